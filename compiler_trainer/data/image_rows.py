"""Rows with images: files are stored with the tokens, and the model's own processor decodes them when a row is made."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.packing import PackedRows, Rows
from compiler_trainer.data.pictures import ImageOptions, image_options
from compiler_trainer.data.tokenizers import Tokenizer
from compiler_trainer.models.processor import Seen


class ImageRows(Rows):
    """Rows whose batches have the arrays that the model's processor makes of images, [rows, images, ...].

    Images of a row are in the order of its tokens. Rows with fewer end with images of ones, which no token reads.
    """

    def __init__(self, rows: PackedRows, images: int, options: ImageOptions):
        assert rows.corpus.images is not None
        self.rows, self.images, self.options, self.files = rows, images, options, rows.corpus.images
        self.seq_len = rows.seq_len
        settings = np.frombuffer(repr((images, options.size)).encode(), np.uint8)
        fingerprint = hash_arrays(np.frombuffer(rows.facts.fingerprint.encode(), np.uint8), settings)
        self.facts = rows.facts._replace(fingerprint=fingerprint)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def padding_image(self) -> Seen:
        """An image of ones: models leave out images of zeros."""
        blank = self.options.processor.blank
        return blank._replace(arrays={name: np.ones_like(array) for name, array in blank.arrays.items()})

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        return self.rows.token_counts(rows)

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        images = [self.of_row(int(row)) for row in rows]
        names = self.padding_image.arrays
        arrays = {name: np.stack([np.stack([image.arrays[name] for image in row]) for row in images]) for name in names}
        return self.rows.batch(rows) | arrays

    def of_row(self, row: int) -> list[Seen]:
        """Return the images of a row."""
        numbers = [n for start, end in self.rows.documents(row) for n in self.files.between(start, end)]
        images = [self.options.processor.see(self.files.file(number)) for number in numbers]
        return images + [self.padding_image] * (self.images - len(images))

    def describe(self) -> str:
        """Return the numbers of images and of their tokens, as text."""
        blank = self.options.processor.blank
        per_image = blank.text.count(self.options.processor.token)
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in blank.arrays.items())
        return f"{len(self.files.at):,} images of {per_image} tokens each ({shapes}), at most {self.images} a row"


def with_images(cfg: DataConfig, tokenizer: Tokenizer, rows: PackedRows) -> PackedRows | ImageRows:
    """Return rows with their images, if a config has any."""
    options = image_options(cfg, tokenizer)
    return rows if options is None else ImageRows(rows, cfg.images_per_row, options)

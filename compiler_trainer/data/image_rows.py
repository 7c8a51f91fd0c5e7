"""Rows with images: files are stored with the tokens, and the model's own processor decodes them when a row is made."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.packing import OfRows, PackedRows
from compiler_trainer.data.pictures import ImageOptions
from compiler_trainer.models.processor import Processor


class ImageRows(OfRows):
    """Rows whose batches have the arrays that the model's processor makes of images, by row.

    Images of a row are in the order of its tokens, and at most `images`. Rows with fewer end with ones, which no token
    reads. If images have any sizes, those of a row have at most `image_tokens` tokens.
    """

    def __init__(self, rows: PackedRows, images: int, image_tokens: int, options: ImageOptions):
        assert rows.corpus.images is not None
        super().__init__(rows)
        self.packed = rows
        self.images, self.image_tokens, self.options, self.files = images, image_tokens, options, rows.corpus.images
        settings = np.frombuffer(repr((images, options.size, *[image_tokens] * (image_tokens > 0))).encode(), np.uint8)
        fingerprint = hash_arrays(np.frombuffer(rows.facts.fingerprint.encode(), np.uint8), settings)
        self.facts = rows.facts._replace(fingerprint=fingerprint)

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        arrays = [self.of_row(int(row)) for row in rows]
        return self.rows.batch(rows) | {name: np.stack([row[name] for row in arrays]) for name in arrays[0]}

    def of_row(self, row: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of a row's images."""
        numbers = [n for start, end in self.packed.documents(row) for n in self.files.between(start, end)]
        processor: Processor = self.options.processor
        seen = [processor.see(self.files.file(number)) for number in numbers]
        return processor.row(seen, self.images, self.image_tokens)

    def describe(self) -> str:
        """Return the numbers of images and of their tokens, as text."""
        count, blank = len(self.files.at), self.options.processor.blank
        if self.image_tokens:
            tokens = int(self.packed.corpus.is_image().sum())
            each = f"{tokens / max(count, 1):,.0f} tokens each in the mean"
            return f"{count:,} images of {each}, at most {self.images} with {self.image_tokens:,} tokens a row"
        per_image = blank.text.count(self.options.processor.token)
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in blank.arrays.items())
        return f"{count:,} images of {per_image} tokens each ({shapes}), at most {self.images} a row"


def image_tokens_of_row(cfg: DataConfig, processor: Processor) -> int:
    """Return the tokens of images that a row has at most, of a model that takes images of any size; 0 for others.

    Raises UserError if the model takes images of any size and no number is given, or one is and it does not.
    """
    tokens = cfg.image_tokens_per_row
    if processor.merge is None:
        if tokens is not None:
            problem = f"is {tokens}, but all images of a run have the same size for this model"
            raise UserError("data.image_tokens_per_row", f"{problem}; set it to null")
        return 0
    if tokens is None and cfg.image_size is None:
        problem = "is null, and images have any sizes; set it to the image tokens of a sequence"
        raise UserError("data.image_tokens_per_row", f"{problem}, at most train.seq_len, or set data.image_size=[H,W]")
    return tokens or cfg.images_per_row * processor.blank.text.count(processor.token)

"""The image processor of a folder: an image file becomes arrays, tables of sizes, and a text in a prompt.

All images of a run have the same sizes, so that one graph holds for all data.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.models.folder import library
from compiler_trainer.models.grids import TABLE, TYPES, fill_table

PIXELS = "pixel_values"
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
MOST_SIZES = 16  # numbers in a table of sizes of an image; a larger table of integers is an array
BLANK = 64  # pixels of each side of the first image that a processor sees, without data.image_size
COUNTS = "num_soft_tokens_per_image"
PADDED = frozenset({"gemma4"})  # models whose images have a number of patches each, with padding
Array = NDArray[Any]


class Seen(NamedTuple):
    """An image for a model: arrays and tables of sizes by the model's names, and the text of its place in a prompt."""

    arrays: dict[str, Array]
    sizes: dict[str, list[Any]]
    text: str


class Processor:
    """The image processor of a folder. Images are resized to `size` first (height, width; None: they are not).

    `blank` is an image of that size. Raises UserError if the folder has no processor of images.
    """

    merge: int | None = None  # patches along each side of a token, of a model that takes images of any size

    def __init__(self, path: str, size: tuple[int, int] | None):
        try:
            self.load(path)
        except Exception as error:  # any kind: the folder is at fault, or a library is missing
            reason = one_line(error)
            raise UserError("data.images_per_row", f"{path} has no processor of images: {reason}") from error
        self.size = size
        content, (height, width) = io.BytesIO(), size or (BLANK, BLANK)
        self.pillow.new("RGB", (width, height), (90, 120, 160)).save(content, "PNG")
        self.blank = self.made(content.getvalue())

    def load(self, path: str) -> None:
        """Read the folder: `token` is the text at the place of an image."""
        self.processor = library().AutoProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
        self.token, _ = str(self.processor.image_token), self.processor.image_processor

    @property
    def pillow(self) -> Any:
        """Pillow's module of images."""
        return library("PIL.Image")

    def see(self, content: bytes) -> Seen:
        """Return an image of a file's content; raise ValueError if it is none, or has other sizes than the first."""
        seen = self.made(content)
        shapes, expected = ({n: (a.shape, a.dtype) for n, a in s.arrays.items()} for s in (seen, self.blank))
        if (shapes, seen.sizes, seen.text) != (expected, self.blank.sizes, self.blank.text):
            name = next((n for n in expected if shapes.get(n) != expected[n]), PIXELS)
            sizes = f"{list(seen.arrays[name].shape)} and not {list(expected[name][0])}"
            raise ValueError(f"becomes {name} {sizes}, and all images need the same; set data.image_size=[H,W]")
        return seen

    def row(self, seen: Sequence[Seen], images: int, image_tokens: int) -> dict[str, Array]:
        """Return the arrays of a row with `images` images, [images, ...].

        Those that are missing are ones, because models leave out images of zeros.
        """
        rows = {name: np.ones((images, *array.shape), array.dtype) for name, array in self.blank.arrays.items()}
        for number, image in enumerate(seen):
            for name, array in image.arrays.items():
                rows[name][number] = array
        return rows

    def picture(self, content: bytes) -> Any:
        """Return Pillow's image of a file's content, resized; raise ValueError if it is none."""
        try:
            image = self.pillow.open(io.BytesIO(content))
            image = library("PIL.ImageOps").exif_transpose(image).convert("RGB")
        except Exception as error:  # of any kind, by format
            raise ValueError(f"is not a readable image: {one_line(error)}") from error
        return image.resize((self.size[1], self.size[0]), self.pillow.Resampling.BICUBIC) if self.size else image

    def inputs(self, text: str, contents: Sequence[bytes]) -> dict[str, Tensor]:
        """Return a model's inputs for a text with a token for each image, as transformers makes them.

        Raises ValueError if a content is no image.
        """
        images = [self.picture(content) for content in contents]
        return dict(self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False))

    def made(self, content: bytes) -> Seen:
        """Return what the processor makes of an image."""
        made = self.processor(
            text=[self.token],
            images=[self.picture(content)],
            return_tensors="np",
            return_text_replacement_offsets=True,
        )
        ((place,),) = made["text_replacement_offsets"]
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in OF_TEXT}
        sizes = {name: a[0].tolist() for name, a in arrays.items() if a.dtype.kind in "iu" and a.size <= MOST_SIZES}
        return Seen({n: a for n, a in arrays.items() if n not in sizes}, sizes, place["replacement"])


class PartedProcessor(Processor):
    """An image processor and a tokenizer, for models whose images have unlike numbers of tokens.

    Transformers' processors of these models need torchvision, for videos.
    """

    def load(self, path: str) -> None:
        """Read the folder: an image is a number of tokens of one kind, between those that begin and end it, if any."""
        transformers, config = library(), config_in(path)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self.processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
        self.token_id = int(config["image_token_id"])
        ids = (self.token_id, config.get("boi_token_id"), config.get("eoi_token_id"))
        token, *ends = (self.tokenizer.convert_ids_to_tokens(token_id) if token_id else "" for token_id in ids)
        self.token, self.ends = str(token), ends

    def counts(self, made: Any) -> list[int]:
        """Return the number of tokens of each image."""
        return [int(count) for count in made[COUNTS]]

    def text(self, count: int) -> str:
        """Return an image in a prompt."""
        return self.ends[0] + self.token * count + self.ends[1]

    def see(self, content: bytes) -> Seen:
        """Return an image of a file's content; raise ValueError if it is none."""
        return self.made(content)

    def made(self, content: bytes) -> Seen:
        """Return what the processor makes of an image."""
        made = self.processor(images=[self.picture(content)], return_tensors="np")
        arrays = {name: np.asarray(value) for name, value in made.items() if name != COUNTS}
        return Seen(arrays, {}, self.text(*self.counts(made)))

    def inputs(self, text: str, contents: Sequence[bytes]) -> dict[str, Tensor]:
        """Return a model's inputs for a text with a token for each image, as transformers makes them.

        Raises ValueError if a content is no image.
        """
        made: dict[str, Any] = {}
        if contents:
            made = dict(self.processor(images=[self.picture(content) for content in contents], return_tensors="pt"))
        first, *others = text.split(self.token)
        images = [self.text(count) for count in self.counts(made)] if made else []
        text = first + "".join(image + other for image, other in zip(images, others, strict=True))
        encoded = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        made.pop(COUNTS, None)
        return {**encoded, **made, "mm_token_type_ids": (encoded["input_ids"] == self.token_id).long()}


class GridProcessor(PartedProcessor):
    """The image processor of a model that takes images of any size, as patches and a table of grids (`grids.py`)."""

    merge: int

    def load(self, path: str) -> None:
        """Read the folder: an image has a token for each `merge` x `merge` patches."""
        super().load(path)
        self.merge = int(self.processor.merge_size)

    def counts(self, made: Any) -> list[int]:
        """Return the number of tokens of each image."""
        return [int(grid.prod()) // self.merge**2 for grid in made[TABLE]]

    def row(self, seen: Sequence[Seen], images: int, image_tokens: int) -> dict[str, Array]:
        """Return the arrays of a row: patches [P, F] of at most `image_tokens`, and a table [images + 1, 3]."""
        blank = self.blank.arrays[PIXELS]
        patches = np.ones((image_tokens * self.merge**2, *blank.shape[1:]), blank.dtype)
        taken = np.concatenate([blank[:0], *(image.arrays[PIXELS] for image in seen)])
        patches[: len(taken)] = taken
        grids = [image.arrays[TABLE][0] for image in seen]
        return {PIXELS: patches, TABLE: fill_table(grids, images, len(patches), self.merge)}


def config_in(path: str) -> dict[str, Any]:
    """Return the content of a folder's config.json, empty if there is none."""
    file = Path(path, "config.json")
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


@lru_cache(maxsize=4)
def processor_of(path: str, size: tuple[int, int] | None) -> Processor:
    """Return the processor of a folder, once."""
    kind = config_in(path).get("model_type")
    return (GridProcessor if kind in TYPES else PartedProcessor if kind in PADDED else Processor)(path, size)

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

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.folder import library
from compiler_trainer.models.grids import TABLE, TYPES, fill_table

PIXELS = "pixel_values"
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
MOST_SIZES = 16  # numbers in a table of sizes of an image; a larger table of integers is an array
BLANK = 64  # pixels of each side of the first image that a processor sees, without data.image_size
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
            reason = " ".join(str(error).split())
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
            raise ValueError(f"is not a readable image: {' '.join(str(error).split())}") from error
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


class GridProcessor(Processor):
    """The image processor of a model that takes images of any size, as patches and a table of grids (`grids.py`).

    Transformers' processors of these models need torchvision, for videos; this one reads their parts.
    """

    merge: int

    def load(self, path: str) -> None:
        """Read the folder: an image is a token of that name for each `merge` x `merge` patches."""
        transformers = library()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self.processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
        self.token_id, self.merge = int(config_in(path)["image_token_id"]), int(self.processor.merge_size)
        self.token = str(self.tokenizer.convert_ids_to_tokens(self.token_id))

    def see(self, content: bytes) -> Seen:
        """Return an image of a file's content; raise ValueError if it is none."""
        return self.made(content)

    def row(self, seen: Sequence[Seen], images: int, image_tokens: int) -> dict[str, Array]:
        """Return the arrays of a row: patches [P, F] of at most `image_tokens`, and a table [images + 1, 3]."""
        blank = self.blank.arrays[PIXELS]
        patches = np.ones((image_tokens * self.merge**2, *blank.shape[1:]), blank.dtype)
        taken = np.concatenate([blank[:0], *(image.arrays[PIXELS] for image in seen)])
        patches[: len(taken)] = taken
        grids = [image.sizes[TABLE] for image in seen]
        return {PIXELS: patches, TABLE: fill_table(grids, images, len(patches), self.merge)}

    def made(self, content: bytes) -> Seen:
        """Return what the processor makes of an image."""
        made = self.processor(images=[self.picture(content)], return_tensors="np")
        return Seen({PIXELS: made[PIXELS]}, {TABLE: made[TABLE][0].tolist()}, self.token * self.tokens(made[TABLE][0]))

    def tokens(self, grid: Any) -> int:
        """Return the number of tokens of an image."""
        return int(grid.prod()) // self.merge**2

    def inputs(self, text: str, contents: Sequence[bytes]) -> dict[str, Tensor]:
        """Return a model's inputs for a text with a token for each image, as transformers makes them.

        Raises ValueError if a content is no image.
        """
        made = {}
        if contents:
            made = dict(self.processor(images=[self.picture(content) for content in contents], return_tensors="pt"))
        first, *others = text.split(self.token)
        images = [self.token * self.tokens(grid) for grid in made.get(TABLE, ())]
        text = first + "".join(image + other for image, other in zip(images, others, strict=True))
        encoded = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        types = (encoded["input_ids"] == self.token_id).long()
        return {**encoded, **made, "mm_token_type_ids": types}


def config_in(path: str) -> dict[str, Any]:
    """Return the content of a folder's config.json, empty if there is none."""
    file = Path(path, "config.json")
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


@lru_cache(maxsize=4)
def processor_of(path: str, size: tuple[int, int] | None) -> Processor:
    """Return the processor of a folder, once."""
    return (GridProcessor if config_in(path).get("model_type") in TYPES else Processor)(path, size)

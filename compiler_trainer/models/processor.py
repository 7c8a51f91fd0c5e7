"""The image processor of a folder: an image file becomes arrays, tables of sizes, and a text in a prompt.

All images of a run have the same sizes, so that one graph holds for all data.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.folder import library

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

    def __init__(self, path: str, size: tuple[int, int] | None):
        transformers = library()
        try:
            self.processor = transformers.AutoProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
            self.token, _ = str(self.processor.image_token), self.processor.image_processor
        except Exception as error:  # any kind: the folder is at fault, or a library is missing
            reason = " ".join(str(error).split())
            raise UserError("data.images_per_row", f"{path} has no processor of images: {reason}") from error
        self.size = size
        content, (height, width) = io.BytesIO(), size or (BLANK, BLANK)
        self.pillow.new("RGB", (width, height), (90, 120, 160)).save(content, "PNG")
        self.blank = self.made(content.getvalue())

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


@lru_cache(maxsize=4)
def processor_of(path: str, size: tuple[int, int] | None) -> Processor:
    """Return the processor of a folder, once."""
    return Processor(path, size)

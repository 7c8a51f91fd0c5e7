"""Images of conversations: where records have them, their contents, and their places in a prompt.

A part of a message is {"type": "image"} with a `path`, `url`, `image` or `bytes`, or {"type": "image_url"}. A part
without these takes the next entry of the record's `images`: paths, or the hub's structs of `bytes` and `path`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.records import IMAGES, BadRecord, Conversation, Message, shorten
from compiler_trainer.data.tokenizers import Tokenizer
from compiler_trainer.places.store import Place, split_url

SOURCES = ("path", "url", "image", "bytes", "image_url")
Places = list[tuple[int, int]]


def take(messages: list[Message], images: Any, base: str) -> tuple[list[Message], tuple[str | bytes, ...]]:
    """Return messages whose images are bare parts, and the images: contents, or paths, relative ones below `base`.

    Raises BadRecord if a part has no image, or an image no part.
    """
    if images is not None and not isinstance(images, list):
        raise BadRecord('field "images" is not a list')
    waiting, taken, bare = list(images or ()), list[str | bytes](), []
    for message in messages:
        parts = message.get("content")
        if not isinstance(parts, list):
            bare.append(message)
            continue
        for part in (part for part in parts if is_image(part)):
            value = next((part[key] for key in SOURCES if part.get(key) is not None), None)
            if value is None and not waiting:
                raise BadRecord(f'a part of type image has none of {", ".join(SOURCES)}, and "images" no entry for it')
            taken.append(located(waiting.pop(0) if value is None else value, base))
        bare.append({**message, "content": [{"type": "image"} if is_image(part) else part for part in parts]})
    if waiting:
        raise BadRecord(f'field "images" has {len(waiting)} more than messages have parts of type image')
    return bare, tuple(taken)


def is_image(part: Any) -> bool:
    """Return True if a part of a message is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGES


def located(value: Any, base: str) -> str | bytes:
    """Return an image's content, or its path or url; raise BadRecord if the value is neither."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadRecord(f"an image is a {type(value).__name__}; give a path, a url, or the bytes of a file")
    if is_remote(value) or os.path.isabs(value):
        return value
    return f"{base}/{value}" if is_remote(base) else os.path.join(base, value)


def content_of(image: str | bytes) -> bytes:
    """Return the content of an image's file; raise BadRecord naming a file that cannot be read."""
    if isinstance(image, bytes):
        return image
    try:
        if is_remote(image):
            folder, name = split_url(image)
            return Place(folder).read(name)
        return Path(image).read_bytes()
    except UserError as error:
        raise BadRecord(f"image {image} cannot be read: {error.message}") from error
    except OSError as error:
        raise BadRecord(f"image {image} cannot be read: {error.strerror or shorten(str(error))}") from error


class ImageFile(NamedTuple):
    """A local file of an image: its size in bytes and its time of change in ns, -1 for a file that is not there."""

    path: str
    size: int
    changed_ns: int

    @staticmethod
    def now(path: str) -> ImageFile:
        """Return the state of a file."""
        try:
            state = os.stat(path)
        except OSError:
            return ImageFile(path, -1, -1)
        return ImageFile(path, state.st_size, state.st_mtime_ns)


def files_of(images: Sequence[str | bytes]) -> tuple[ImageFile, ...]:
    """Return the local files among images."""
    return tuple(ImageFile.now(os.path.abspath(i)) for i in images if isinstance(i, str) and not is_remote(i))


def refuse_unread(chat: Conversation) -> None:
    """Raise BadRecord if messages have images that were not read."""
    if chat.images:
        return
    for number, message in enumerate(chat.messages):
        for at, part in enumerate(message["content"] if isinstance(message.get("content"), list) else ()):
            if is_image(part):
                problem = f'field "messages[{number}].content[{at}]" is of type {part["type"]}'
                raise BadRecord(f"{problem}; only parts of type text are trained on, unless data.images_per_row is set")


def with_image_texts(chat: Conversation, upto: int | None, text: str, places: Places) -> tuple[str, Places]:
    """Return a rendered text with the texts of images at their places, and its places moved accordingly.

    Raises BadRecord unless all messages have a place for each image.
    """
    if not chat.image_token:
        return text, places
    starts = [match.start() for match in re.finditer(re.escape(chat.image_token), text)]
    expected = images_in(chat.messages[:upto])
    if len(starts) != expected:
        raise BadRecord(f"the chat template writes {chat.image_token} {len(starts)} times for {expected} images")

    def moved(at: int) -> int:
        """Return a position after the images before it have grown."""
        return at + sum(len(t) - len(chat.image_token) for s, t in zip(starts, chat.image_texts) if s < at)

    texts = iter(chat.image_texts)
    expanded = re.sub(re.escape(chat.image_token), lambda _: next(texts), text)
    return expanded, [(moved(start), moved(end)) for start, end in places]


def images_in(messages: Sequence[Message]) -> int:
    """Return the number of parts that are images."""
    contents = (message.get("content") for message in messages)
    return sum(is_image(part) for content in contents if isinstance(content, list) for part in content)


def starts_of(texts: Sequence[str], text: str, places: Any) -> list[int]:
    """Return the first token of each image of a text, of the tokens at `places`, [tokens, 2]; `texts` may have more."""
    starts, at = list[int](), 0
    for image in texts:
        at = text.find(image, at)
        if at < 0:
            break
        starts.append(int((places[:, 1] > at).argmax()))
        at += len(image)
    return starts


# ---- the model's processor ---------------------------------------------------------------------------


class ImageOptions(NamedTuple):
    """The images of conversations: the folder of the model's processor, and the size that they are resized to."""

    folder: str
    size: tuple[int, int] | None

    @property
    def processor(self) -> Any:
        """The folder's processor."""
        return import_module("compiler_trainer.models.processor").processor_of(self.folder, self.size)  # imports torch

    @property
    def decides(self) -> list[object]:
        """Everything that tokens depend on: the text at the place of an image, and the processor that accepts it."""
        blank = self.processor.blank
        shapes = {name: array.shape for name, array in blank.arrays.items()}
        return ["images with their files", self.processor.token, blank.text, self.size, shapes]

    def read(self, chat: Conversation) -> tuple[Conversation, list[bytes]]:
        """Return a conversation with the texts of its images, and their files; raise BadRecord naming a bad one."""
        return self.with_texts(chat, self.processor.see)

    def look(self, chat: Conversation) -> tuple[Conversation, list[bytes]]:
        """Return a conversation as `read` does, of which images may have any sizes."""
        return self.with_texts(chat, self.processor.made)

    def with_texts(self, chat: Conversation, see: Callable[[bytes], Any]) -> tuple[Conversation, list[bytes]]:
        """Return a conversation with the texts of its images, as `see` gives them, and their files."""
        contents, texts = [content_of(image) for image in chat.images], []
        for image, content in zip(chat.images, contents):
            try:
                texts.append(see(content).text)
            except ValueError as error:
                name = "an image" if isinstance(image, bytes) else f"image {image}"
                raise BadRecord(f"{name} {error}") from error
        return chat._replace(image_texts=tuple(texts), image_token=self.processor.token), contents


def image_options(cfg: DataConfig, tokenizer: Tokenizer) -> ImageOptions | None:
    """Return the options of images of a config; the processor is next to the tokenizer. None without images."""
    return ImageOptions(str(Path(tokenizer.path).parent), cfg.image_size) if cfg.images_per_row else None


def restore_options(values: Any) -> ImageOptions | None:
    """Return options from their JSON."""
    return None if values is None else ImageOptions(values[0], values[1] and tuple(values[1]))

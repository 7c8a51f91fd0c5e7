"""`chat` and `generate` send images to a vision-language model as its processor makes them."""

from __future__ import annotations

import io
import sys

import pytest
import torch
import transformers as tf
from commands import call
from PIL import Image
from vision_folders import picture, vision_folder

from compiler_trainer.cli.verbs import chat

SAMPLING = ("--tokens", "6", "--temperature", "0")


@pytest.fixture
def images(tmp_path):
    """Return two files with images of different sizes."""
    for number, size in enumerate(((20, 18), (33, 12))):
        (tmp_path / f"{number}.png").write_bytes(picture(number, size))
    return [tmp_path / f"{number}.png" for number in range(2)]


def talk(monkeypatch, capsys, *lines, of=(), kind="llava"):
    """Return what `chat` answers to lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert call("chat", vision_folder(kind), *of, *SAMPLING) == 0
    return capsys.readouterr()


def by_transformers(kind, images, text):
    folder = vision_folder(kind)
    processor, model = tf.AutoProcessor.from_pretrained(folder, backend="pil"), tf.AutoModelForImageTextToText.from_pretrained(folder).eval()
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[Image.open(i).convert("RGB") for i in images] or None, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["llava", "idefics3"])
def test_a_folder_answers_about_images_as_transformers_does(kind, images, monkeypatch, capsys):
    output = talk(monkeypatch, capsys, f"/image {images[0]}", "what?", "/new", f"/image {images[0]}", f"/image {images[1]}", "both?",
                  "/new", "none?", of=["--images"], kind=kind)
    assert "/image FILE shows an image, /new begins" in output.err
    answers = [by_transformers(kind, images[:1], "what?"), by_transformers(kind, images, "both?"), by_transformers(kind, [], "none?")]
    assert output.out == "".join(f"{answer}\n" for answer in answers)
    assert len({*answers}) > 1


def test_an_image_stays_in_the_conversation(images, monkeypatch, capsys):
    """The second answer sees the image of the first message, too."""
    seen, plain = [], chat.prompt_with_images

    def noted(*how):
        prompt = plain(*how)
        seen.append((prompt.inputs["pixel_values"], len(prompt.ids)))
        return prompt

    monkeypatch.setattr(chat, "prompt_with_images", noted)
    talk(monkeypatch, capsys, f"/image {images[0]}", "a", "b", f"/image {images[1]}", "c", of=["--images"])
    (first, short), (again, longer), (both, _) = seen
    assert torch.equal(first, again) and torch.equal(both[:1], first) and len(both) == 2 and not torch.equal(both[1:], first)
    assert longer > short


def test_what_is_no_image_is_refused_and_the_conversation_goes_on(images, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.png").write_text("no image")
    output = talk(monkeypatch, capsys, f"/image {tmp_path / 'text.png'}", "a", "/image missing.png", "a", f"/image {images[0]}", "what?", of=["--images"])
    first, second = (line for line in output.err.splitlines() if line.startswith("error"))
    assert f"prompt: image {tmp_path}/text.png is not a readable image" in first
    assert "prompt: image missing.png cannot be read: No such file or directory" in second
    assert output.out == f"{by_transformers('llava', images[:1], 'what?')}\n"


def test_a_model_without_images_sees_none(images, monkeypatch, capsys):
    output = talk(monkeypatch, capsys, f"/image {images[0]}", "what?")
    assert "/image" not in output.err.splitlines()[0]
    assert "error: --image: the model was trained without images (data.images_per_row), and sees none" in output.err


def test_an_image_needs_a_conversation(tmp_path, capsys):
    assert call("generate", tmp_path, "--image", "a.png") == 2
    assert capsys.readouterr().err == "error: --image: is a part of a message; add --chat\n"

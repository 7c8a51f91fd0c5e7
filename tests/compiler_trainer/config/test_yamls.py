"""Config files that are not YAML, or endless, are refused by name."""

from __future__ import annotations

import pytest

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import check_folder, check_yaml


@pytest.mark.parametrize(("content", "says"), [
    (b"caf\xe9: 1\n", "is not UTF-8"),
    (b"a: [1, ", "is not valid YAML"),
    (b"5\n", "holds no options"),
    (b"a: &a {b: *a}\n", "contains itself"),
    (b"[" * 5000, "nested too deep"),
    (b"a: 1\nb: " + b"9" * 5000, "line 2: 99999999999999999999... has 5,000 digits, more than"),
    (b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(b"%c: &%c [%s]\n" % (k, k, b", ".join([b"*%c" % (k - 1)] * 10)) for k in range(98, 104)),
     "has 12,"),
])
@pytest.mark.sample(2)
def test_a_file_that_is_no_config(tmp_path, content, says):
    path = tmp_path / "groups" / "odd.yaml"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        check_folder(tmp_path)
    assert caught.value.place == str(path)


def test_aliases_and_nothing_at_all_are_fine(tmp_path):
    path = tmp_path / "fine.yaml"
    for content in ("", "a: &a {b: 1}\nc: *a\nd: *a\n"):
        path.write_text(content)
        check_yaml(path)

"""Text of models, data and verifiers never steers a terminal."""

import pytest

from kenpo.terminal import one_line, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ü, 拳法, 👨‍👩‍👧", "plain text, ü, 拳法, 👨‍👩‍👧"),
        ("a\nb\tc", "a\nb\tc"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),  # ESC [ in one character
        ("a\rb\x7f\x08", "a\\rb\\x7f\\x08"),
        ("\u202eright to left\u2066", "\\u202eright to left\\u2066"),
        ("\ud800", "\\ud800"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_what_steers_a_terminal_is_written_out(text, shown):
    assert plain(text) == shown
    plain(text).encode()  # and can be printed


def test_one_line_is_one_line():
    text = one_line("first\r\n second\x0b third\u2028fourth\x1b[31m")
    assert text == "first second third fourth\\x1b[31m"


def test_completions_are_shown_plain(monkeypatch, capsys, tmp_path):
    from kenpo.cli import main
    from kenpo.engines.hf import HFEngine

    real = HFEngine.sample

    def steering(self, requests, done=None):
        episodes = real(self, requests, done)
        for e in episodes:
            object.__setattr__(e, "text", "\x1b[31mred\x07")
        return episodes

    monkeypatch.setattr(HFEngine, "sample", steering)
    assert main(["sample", "bundled", "--prompt", "1+2=", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "\\x1b[31mred\\x07\n"


def test_errors_are_shown_plain(capsys, tmp_path):
    from kenpo.cli import main

    (tmp_path / "bad.py").write_text("raise ValueError('\\x1b[2J\\x07 gone')\n")
    assert main(["train", "--algorithm", f"{tmp_path / 'bad.py'}:MINE"]) == 2
    error = capsys.readouterr().err
    assert "\\x1b[2J\\x07 gone" in error
    assert "\x1b" not in error

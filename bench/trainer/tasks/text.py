"""Task ``text``: predict the next character of a text with an LSTM."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from . import BadInput, Defaults, Task

WINDOW = 64  # characters per example
MAX_ALPHABET = 1024


def load(data: Path | None, hidden: int | None) -> Task:
    """A text cut into windows of 64 characters; its last tenth is the test text.

    Without a file: Python's own help topics (``pydoc_data``), about 460,000 characters.

    Raises:
        BadInput: the file is not UTF-8 text, is too short, or has too many different characters.
    """
    text = _read(data) if data is not None else _topics()
    alphabet = sorted(set(text))
    if len(alphabet) > MAX_ALPHABET:
        raise BadInput(f"--data {data}: {len(alphabet)} different characters, at most {MAX_ALPHABET} can be learnt")
    number = {c: i for i, c in enumerate(alphabet)}
    codes = torch.tensor([number[c] for c in text], dtype=torch.int64)
    cut = len(text) - len(text) // 10
    train, test = _windows(codes[:cut]), _windows(codes[cut:])
    if len(test[0]) == 0:
        raise BadInput(f"--data {data}: {len(text)} characters; at least {10 * (WINDOW + 1)} are needed")
    width = hidden or 256
    return Task("text", lambda: CharLSTM(len(alphabet), width), train, test, Defaults("adam", 0.003, 400, 16))


class CharLSTM(nn.Module):
    """Characters (batch, time) int64 → logits (batch, time, alphabet)."""

    def __init__(self, alphabet: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, 64)
        self.lstm = nn.LSTM(64, width, batch_first=True)
        self.out = nn.Linear(width, alphabet)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the character that follows each one."""
        hidden, _ = self.lstm(self.embed(x))
        logits: Tensor = self.out(hidden)
        return logits


def _windows(codes: Tensor) -> tuple[Tensor, Tensor]:
    n = max(0, len(codes) - 1) // WINDOW
    return codes[: n * WINDOW].view(n, WINDOW), codes[1 : n * WINDOW + 1].view(n, WINDOW)


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[k] for k in sorted(topics))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise BadInput(
            f"--data {path}: not UTF-8 text ({e.reason} at byte {e.start}); task 'text' reads plain text"
        ) from e

"""Reads the `tokenizer.json` of a checkpoint folder."""

from pathlib import Path

from tokenizers import Tokenizer

from suite.errors import CheckpointError


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of the checkpoint in `folder`. Raises CheckpointError where it is missing or unreadable."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(str(path), "no such file", "the tokenizer of the checkpoint")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception and nothing narrower
        raise CheckpointError(str(path), str(error), "a tokenizer.json that the tokenizers library reads") from None

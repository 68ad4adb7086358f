"""Checks checkpoint folders without reading a weight: `python -m suite.models.check FOLDER ...`.

The parent of a run asks this in a process of its own, because it never imports torch itself. Exit
code 0 when every folder would load, 4 with the first error as one JSON object on stdout.
"""

import json
import sys

from suite.errors import InputError
from suite.models.loader import check_checkpoint
from suite.models.tokenizer import load_tokenizer


def main(folders: list[str]) -> int:
    for folder in folders:
        try:
            check_checkpoint(folder)
            load_tokenizer(folder)
        except InputError as error:
            print(json.dumps({"field": error.field, "value": error.value, "expected": error.expected}, default=str))
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

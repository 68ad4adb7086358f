"""Checks checkpoint folders without reading a weight: `python -m suite.models.check FOLDER ...`.

The parent of a run asks this in a process of its own, because it never imports torch itself. Exit
code 0 when every folder would load, with their models' positions as a JSON object on stdout, by folder; 4
with the first error as one.
"""

import json
import sys

from suite.errors import InputError
from suite.models.loader import check_checkpoint
from suite.models.tokenizer import load_tokenizer


def main(folders: list[str]) -> int:
    positions = {}
    for folder in folders:
        try:
            positions[folder] = check_checkpoint(folder)
            load_tokenizer(folder)
        except InputError as error:
            field = error.field if error.field.startswith(folder) else f"{folder}: {error.field}"
            print(json.dumps({"field": field, "value": error.value, "expected": error.expected}, default=str))
            return error.exit_code
    print(json.dumps(positions))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

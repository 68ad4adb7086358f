"""The accuracy tasks: YAML files in lm-eval's own format, plus a `generator` block that says where documents come from.

lm-eval gets them as dictionaries with a callable that returns the documents: no
network, no templates, no cache on disk.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from suite.e2e.accuracy.documents import Document, documents
from suite.errors import InputError, UnknownNameError
from suite.models.languages import language

TASKS = Path(__file__).parent / "tasks"
LENGTH = re.compile(r"[1-9][0-9]{0,8}")  # one spelling for each length: a task has one name
REQUIRED, OPTIONAL = {"language", "length"}, {"choices"}  # of the generator block


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. `settings` is what lm-eval is given; the rest says which documents are asked."""

    name: str
    settings: dict[str, Any]
    language: str
    length: int
    choices: int

    @property
    def metric(self) -> str:
        """The lm-eval metric that says whether an item was answered."""
        return self.settings["metric_list"][0]["metric"]

    @property
    def longest(self) -> int:
        """Tokens of a prompt and the longest answer that is asked for."""
        return self.length + self.settings.get("generation_kwargs", {}).get("max_gen_toks", 1)

    def check_length(self) -> None:
        """InputError where a prompt of `length` words is too short to hold a question."""
        if self.length < parse_task_file(self.name.partition("@")[0]).length:  # the file's own length is enough
            documents(self.language, seed=0, n=1, length=self.length, choices=self.choices)

    def documents(self, *, seed: int, n: int) -> list[Document]:
        return documents(self.language, seed=seed, n=n, length=self.length, choices=self.choices)


def task_names() -> tuple[str, ...]:
    """Every task there is."""
    return tuple(sorted(path.stem for path in TASKS.glob("*.yaml")))


def load_task(name: str) -> Task:
    """The task `name`; `recall@128` is `recall` with prompts of 128 tokens. Raises UnknownNameError and InputError."""
    stem, at, length = name.partition("@")
    if stem not in task_names():
        raise UnknownNameError("task", name, task_names())
    task = parse_task_file(stem)
    if not at:
        return task
    if not LENGTH.fullmatch(length):
        raise InputError("task", name, f"{stem}@LENGTH with a positive number of tokens, of at most 9 digits")
    return Task(
        name=name,
        settings={**task.settings, "task": name},
        language=task.language,
        length=int(length),
        choices=task.choices,
    )


def parse_task_file(name: str) -> Task:
    """The task of the file NAME.yaml."""
    return parse_task((TASKS / f"{name}.yaml").read_text(encoding="utf-8"), name)


def parse_task(text: str, where: str) -> Task:
    """A task from the text of its YAML file. Raises InputError naming the field."""
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(where, str(error), "valid YAML") from None
    if not isinstance(settings, dict):
        raise InputError(where, settings, "a mapping")
    generator = settings.pop("generator", None)
    if not isinstance(generator, dict):
        raise InputError(f"{where}: generator", generator, "a mapping with language and length")
    for field in sorted((set(generator) - REQUIRED - OPTIONAL) | (REQUIRED - set(generator))):
        value = generator.get(field, "nothing")
        raise InputError(f"{where}: generator.{field}", value, f"the fields {', '.join(sorted(REQUIRED | OPTIONAL))}")
    for field in ("task", "output_type", "metric_list"):
        if field not in settings:
            raise InputError(f"{where}: {field}", "nothing", "the field to be present")
    for field in ("length", "choices"):
        if type(value := generator.get(field, 0)) is not int or value < 0:
            raise InputError(f"{where}: generator.{field}", value, "a whole number")
    language(generator["language"])
    return Task(
        name=settings["task"],
        settings=settings,
        language=generator["language"],
        length=generator["length"],
        choices=generator.get("choices", 0),
    )

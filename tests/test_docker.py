"""The images install what pyproject.toml declares, as nobody but themselves; compose joins them to PostgreSQL."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.test_docs import check_command

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = re.compile(r"python -m pip install --quiet (?:--constraint (\S+) )?-e '\.\[([\w,]+)\]'$")


def steps_of(name):
    """(instruction, its text) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "gpu.Dockerfile"])
def test_an_image_installs_the_project_as_the_makefile_does_and_not_as_root(name):
    steps = steps_of(name)
    bases = [text for word, text in steps if word == "FROM"]
    assert len(bases) == 1
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", bases[0])  # a tag with a version, not `latest`
    installs = [at for at, (word, text) in enumerate(steps) if word == "RUN" and "pip install" in text]
    assert len(installs) == 1
    constraint, extras = INSTALL.fullmatch(steps[installs[0]][1]).groups()
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert constraint is None or (ROOT / constraint).is_file()
    users = [at for at, (word, _) in enumerate(steps) if word == "USER"]
    assert users
    assert users[0] < installs[0]
    assert all(steps[at][1] not in ("root", "0") for at in users)
    assert ("ENTRYPOINT", '["kvproof"]') in steps
    assert "python -m pip install --quiet -e '.[" in (ROOT / "Makefile").read_text()


def test_the_pins_of_the_gpu_image_are_what_the_project_allows():
    pins = [Requirement(line) for line in (DOCKER / "gpu.txt").read_text().splitlines() if not line.startswith("#")]
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    allowed = {found.name: found.specifier for found in map(Requirement, declared)}
    assert {"torch", "flashinfer-python", "sglang-kernel"} <= {pin.name for pin in pins}
    for pin in pins:
        (version,) = [each.version for each in pin.specifier if each.operator == "=="]
        assert allowed[pin.name].contains(version), f"{pin} is not {allowed[pin.name]}"
        assert version in (ROOT / "docs" / "figures.md").read_text()


def test_compose_runs_a_command_that_there_is_on_the_database_beside_it():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    command = services["kvproof"]["command"]
    check_command(shlex.join(re.sub(r"=", " ", word, count=1) for word in command).replace("'", ""))
    assert (ROOT / command[1]).is_file()
    (database,) = [word for word in command if word.startswith("--db=")]
    user, host, name = re.fullmatch(r"--db=postgresql://(\w+)@(\w+)/(\w+)", database).groups()
    environment = services[host]["environment"]
    assert (environment["POSTGRES_USER"], environment["POSTGRES_DB"]) == (user, name)
    assert host in services["kvproof"]["depends_on"]
    named = {volume.split(":")[0] for service in services.values() for volume in service["volumes"]}
    assert named == set(compose["volumes"])
    assert (DOCKER / services["kvproof"]["build"]["context"] / services["kvproof"]["build"]["dockerfile"]).is_file()

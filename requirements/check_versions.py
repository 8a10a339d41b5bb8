"""Install the lowest or the newest versions that setup.cfg allows and run the fast tests with them.

    python requirements/check_versions.py lowest                 # Python 3.11
    python requirements/check_versions.py newest --python 3.13
    python requirements/check_versions.py lowest --only-resolve  # seconds: do the declared minimums fit together?
    python requirements/check_versions.py lowest --keep /tmp/versions --pytest-args -n 2 --dist loadgroup
    python requirements/check_versions.py lowest --keep /tmp/versions --pytest-args --last-failed

*Lowest* is every declared minimum at the same time: a minimum that another package rules out is an error, because pip
would never install it. *Newest* is what pip takes today. The environment takes up to 8 GB, most of it CUDA libraries
that come with torch. It is deleted at the end, unless `--keep` names a folder for it: the next run there brings it up
to date with setup.cfg in seconds, and pytest remembers what failed. Needs uv, which `make versions` installs.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("test", "tensorboard")
"""What is installed for the tests; `vllm` fixes torch and is checked by itself (`check_vllm.py`)."""
SHOWN = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "pydantic", "pytest")
TESTS = ("-m", "not slow and not vllm and not release and not matrix")


def main(argv: list[str] | None = None) -> int:
    """Resolve, install, test; prints a row for docs/versions.md.

    Returns:
        The exit code: 0 if everything passed.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("lowest", "newest"))
    parser.add_argument("--python", default="3.11", help="Version or path of the interpreter (3.11).")
    parser.add_argument("--only-resolve", action="store_true", help="Install and test nothing.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Keep the environment here for the next run.")
    parser.add_argument(
        "--pytest-args", nargs=argparse.REMAINDER, default=[], help="All that follows goes to pytest, such as -n 2."
    )
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-r1-trl-versions-")))
        else:
            folder = arguments.keep.resolve() / f"{arguments.which}-{Path(arguments.python).name}"
            folder.mkdir(parents=True, exist_ok=True)
        return check(folder, arguments)


def check(folder: Path, arguments: argparse.Namespace) -> int:
    """Resolve, install and test in this folder, which may hold what an earlier run left; the exit code."""
    locked = resolve(folder, arguments.which, arguments.python)
    if locked is None:
        return 1
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", locked.read_text(encoding="utf-8"), re.MULTILINE))
    found = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    if arguments.only_resolve:
        print(f"{arguments.which}, Python {arguments.python}: {found}")
        return 0
    python = install(folder, locked, arguments.python)
    result, code = run_tests(python, ["-o", f"cache_dir={folder / 'pytest'}", *arguments.pytest_args])
    print(f"\n| {arguments.which} | {arguments.python} | {found} | {result} | {date.today()} |")
    return code


def resolve(folder: Path, which: str, python: str) -> Path | None:
    """Write the versions to a file of requirements; None, with the reason on standard error, if there are none."""
    minimums, locked = folder / "minimums.txt", folder / "locked.txt"
    minimums.write_text("\n".join(declared_minimums() if which == "lowest" else []), encoding="utf-8")
    interpreter = "--python" if Path(python).is_file() else "--python-version"  # which need not be installed
    command = ["uv", "pip", "compile", "--quiet", "--upgrade", "--no-annotate", interpreter, python]
    command += ["--output-file", locked]
    extras = [item for extra in EXTRAS for item in ("--extra", extra)]
    done = subprocess.run([*command, *extras, "--constraint", minimums, ROOT / "setup.cfg"])
    return locked if done.returncode == 0 else None


def declared_minimums(path: Path = ROOT / "setup.cfg") -> list[str]:
    """`name==minimum` for every requirement of the package and of the extras that are tested."""
    return sorted({f"{item.name}=={minimum}" for item, minimum in _minimums(path)})


def _minimums(path: Path) -> Iterator[tuple[Requirement, str]]:
    config = configparser.ConfigParser()
    config.read(path, encoding="utf-8")
    lists = [config["options"]["install_requires"]]
    lists += [lines for extra, lines in config["options.extras_require"].items() if extra not in ("vllm", "dev")]
    for line in "\n".join(lists).splitlines():
        if not line.strip() or line.startswith(("#", "agent-r1-trl")):
            continue
        requirement = Requirement(line)
        lowest = [item.version for item in requirement.specifier if item.operator == ">="]
        if not lowest:
            raise ValueError(
                f"setup.cfg: {requirement.name} has no minimum; declare the oldest version that was tested."
            )
        yield requirement, lowest[0]


def install(folder: Path, locked: Path, python: str) -> Path:
    """The interpreter of an environment with these versions and this package; made unless it is there."""
    environment = folder / "environment"
    target = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not target.exists():
        subprocess.run(["uv", "venv", "--quiet", "--seed", "--python", python, environment], check=True)
    uv = ["uv", "pip", "install", "--quiet", "--python", target]
    subprocess.run([*uv, "--requirement", locked], check=True)
    subprocess.run([*uv, "--no-deps", "--editable", ROOT], check=True)
    return target


def run_tests(python: Path, options: list[str]) -> tuple[str, int]:
    """Pytest's last line (its exit code where it wrote none), and the exit code."""
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-q", *TESTS, *options]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    code = process.wait()
    return re.sub(r" in [\d.]+s.*", "", last.strip("= ")) or f"pytest ended with {code}", code


if __name__ == "__main__":
    sys.exit(main())

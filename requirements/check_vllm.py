"""Check every minor release of vLLM for each name, argument, option, route and variable that we use.

    python requirements/check_vllm.py                    # the range of setup.cfg, and what is newer on the index
    python requirements/check_vllm.py 0.24 0.31          # these
    python requirements/check_vllm.py --folder SOURCES   # an unpacked wheel, or site-packages

The wheels are downloaded one at a time (about 300 MB each), read, never installed or imported, and deleted. A release
that passes has all that we name; whether it still means the same, only a run with it can tell.
"""

from __future__ import annotations

import argparse
import configparser
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from vllm_release import Release
from vllm_uses import Use, collect_uses

SETUP = Path(__file__).resolve().parents[1] / "setup.cfg"


def main(argv: list[str] | None = None) -> int:
    """Print one row per release.

    Returns:
        1 if a release within the declared range lacks something.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minors", nargs="*", metavar="0.N", help="Minor releases; by default all that are declared.")
    parser.add_argument("--folder", type=Path, help="Look at the sources in this folder instead.")
    arguments = parser.parse_args(argv)
    uses = collect_uses()
    if arguments.folder is not None:
        lacks = Release(arguments.folder).lacks(uses)
        print("\n".join(map(str, lacks)) or f"{arguments.folder}: has all {len(uses)}")
        return bool(lacks)
    declared = declared_range()
    has_failed = False
    print(f"{len(uses)} uses of vLLM; declared: {declared}\n\n| release | declared | lacks |\n|---|---|---|")
    for minor in arguments.minors or minors_on_the_index(declared):
        version, lacks = check_minor(minor, uses)
        is_declared = declared.specifier.contains(version)
        has_failed |= is_declared and bool(lacks)
        print(
            f"| {version} | {'yes' if is_declared else 'no'} | {', '.join(map(str, lacks)) or 'nothing'} |", flush=True
        )
    return has_failed


def declared_range() -> Requirement:
    """The requirement of the extra `vllm`."""
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    (line,) = config["options.extras_require"]["vllm"].split("\n")[1:]
    return Requirement(line)


def minors_on_the_index(declared: Requirement) -> list[str]:
    """Minor releases from the lowest declared one to the newest there is."""
    lowest = min(Version(item.version) for item in declared.specifier if item.operator == ">=")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "vllm"], capture_output=True, text=True, check=True
    ).stdout
    line = re.search(r"Available versions: (.*)", listed)
    assert line is not None, listed
    versions = {Version(text).release[:2] for text in line[1].split(", ") if Version(text) >= lowest}
    return [".".join(map(str, release)) for release in sorted(versions)]


def check_minor(minor: str, uses: list[Use]) -> tuple[str, list[Use]]:
    """The newest patch of a minor release, and what it lacks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
        subprocess.run([*command, "--only-binary", ":all:", "--dest", folder, f"vllm=={minor}.*"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
        return wheel.name.split("-")[1], Release(Path(folder)).lacks(uses)


if __name__ == "__main__":
    sys.exit(main())

"""Are the installed packages of the versions that this package supports?"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence

from packaging.requirements import Requirement
from packaging.version import Version

from agent_r1_trl.doctor.report import Report

_NAME = "agent-r1-trl"


def check_versions(
    report: Report,
    *,
    requirements: Sequence[str] | None = None,
    installed: Callable[[str], str] = importlib.metadata.version,
) -> None:
    """Compare the installed versions with the supported ones; an optional package may be missing.

    Args:
        report: collects the findings.
        requirements: as in setup.cfg; those of the installed package if None.
        installed: returns the version of a distribution, or raises PackageNotFoundError.
    """
    if requirements is None:
        try:
            requirements = importlib.metadata.requires(_NAME) or []
        except importlib.metadata.PackageNotFoundError:
            report.warning(
                "versions",
                f"{_NAME} is not installed (it runs from a folder), so its requirements are unknown.",
                "pip install -e . in the clone.",
            )
            return
    fine = []
    for text in requirements:
        requirement = Requirement(text)
        is_optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if requirement.marker is not None and not is_optional and not requirement.marker.evaluate():
            continue
        try:
            version = installed(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not is_optional:
                report.error(
                    "versions",
                    f"{requirement.name} is not installed.",
                    f"pip install '{_without_marker(requirement)}'",
                )
            continue
        if not requirement.specifier.contains(Version(version).public, prereleases=True):
            report.error(
                "versions",
                f"{requirement.name} {version} is outside the supported window {requirement.specifier}.",
                f"pip install '{_without_marker(requirement)}'",
            )
        elif requirement.name in ("trl", "transformers", "torch", "vllm"):
            fine.append(f"{requirement.name} {version}")
    report.ok("versions", ", ".join(dict.fromkeys(fine)) + ": inside the supported windows.")


def _without_marker(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"

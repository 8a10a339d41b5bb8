"""The README and the pages of docs/ say what is true: their code runs, their links, commands and paths exist."""

import contextlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from agent_r1_trl import StopReason
from agent_r1_trl.cli import find_commands, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, source) of the fenced blocks of one language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in found]


@pytest.mark.parametrize("page", [page for page in RUNNABLE if page.name != "README.md"], ids=page_id)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path / "cache"))
    namespace = {"__name__": f"docs_{page.stem}"}
    for line, source in code_blocks(page, "python"):
        padded = "\n" * (line - 1) + source  # so that a traceback names the line of the page
        exec(compile(padded, str(page), "exec"), namespace)
    for name, value in [*namespace.items()]:  # a test file that the page shows
        if name.startswith("test_"):
            value()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)(#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target, _ in links if not (page.parent / target).exists()]
    assert not missing, f"{page_id(page)} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_headings_find_their_heading(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        anchors = {heading_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert anchor in anchors, f"{page_id(page)} links to {target}#{anchor}"


def heading_anchor(heading: str) -> str:
    """GitHub's anchor of a heading.

    >>> heading_anchor("What each `length` means, and [why](page.md)")
    'what-each-length-means-and-why'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_and_file_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ +|\$ )make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= targets, f"{page_id(page)} names make targets that do not exist: {sorted(named - targets)}"
    folders = "src|tests|docs|recipes|benchmarks|notebooks|requirements"
    paths = set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*\w)(?![\w*<{{])", text))
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing, f"{page_id(page)} names files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_python_file_named_as_a_command_exists(page):
    scripts = re.findall(
        r"(?:python3?|torchrun [^\n]*?|launch [^\n]*?) ([\w./-]+\.py)", page.read_text(encoding="utf-8")
    )
    missing = [script for script in scripts if not (ROOT / script).exists() and "/" in script]
    assert not missing, f"{page_id(page)} runs {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_name_that_a_page_sends_the_reader_to_is_in_that_file(page):
    """Written as: `name` in [file](link), methods as `Class.method`."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([\w.]+)`\s+in\s+\[[^\]]+\]\(([^)#\s]+\.py)\)", text)
    missing = []
    for name, target in named:
        defined = set(re.findall(r"(?:def|class) (\w+)", (page.parent / target).read_text(encoding="utf-8")))
        if not set(name.split(".")) <= defined:
            missing.append(f"{name} in {target}")
    assert not missing
    assert len(named) > 20 or page.name != "one-training-step.md"


def test_the_readme_counts_the_lines_of_each_package():
    """To the hundred, within a twentieth, so that a change need not touch the page."""
    text, source = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "src" / "agent_r1_trl"

    def num_lines(path: Path) -> int:
        files = [path] if path.is_file() else path.rglob("*.py")
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    counted = {folders: int(num.replace(",", "")) for num, folders in re.findall(r"([\d,]+) lines \((`[^)]+)\)", text)}
    for folders, stated in counted.items():
        assert stated == pytest.approx(sum(num_lines(source / name) for name in re.findall(r"\w+", folders)), rel=0.05)
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    assert set(re.findall(r"\w+", " ".join(counted))) == packages
    (one_file,) = re.findall(r"The one file is (\d+) lines", text)
    assert int(one_file) == pytest.approx(num_lines(ROOT / "recipes" / "one_file" / "grpo.py"), rel=0.05)


def test_the_settings_a_page_explains_are_settings():
    from agent_r1_trl import MultiTurnGRPOConfig, Tool

    text = (ROOT / "docs" / "rollout-settings.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    fields = {name for name in first_cells if name.isidentifier() and name not in ("keep", "mask", "penalise")}
    options = {match for name in first_cells for match in re.findall(r"@tool\((\w+)=", name)}
    assert len(fields) >= 7 and len(options) == 2
    assert fields <= set(MultiTurnGRPOConfig.__dataclass_fields__)
    assert options <= set(inspect.signature(Tool).parameters)


def test_the_defaults_a_page_gives_are_the_defaults():
    from agent_r1_trl import MultiTurnGRPOConfig, ToolEnv
    from agent_r1_trl.tools.base import DEFAULT_MAX_RESULT_CHARS

    text = (ROOT / "docs" / "rollout-settings.md").read_text(encoding="utf-8").split("\n## ")[0]
    stated = dict(re.findall(r"^\| `(\w+)` \| (\w+)", text, re.MULTILINE))
    for name, item in MultiTurnGRPOConfig.__dataclass_fields__.items():
        if name in stated:
            assert stated[name] == ("none" if item.default is None else str(item.default)), name
    assert f"| `@tool(max_result_chars=...)` | {DEFAULT_MAX_RESULT_CHARS} |" in text
    assert f"| `@tool(timeout_s=...)` | {ToolEnv.tool_timeout_s:g} |" in text


def test_the_messages_in_troubleshooting_are_messages_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = text.split("## Messages")[1].split("## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) >= 8
    # Said by torch itself, and by vLLM, which not every environment has.
    elsewhere = ("operator torchvision", "Triton is installed")
    files = [
        *(ROOT / "src").rglob("*.py"),
        source_of("trl.trainer.grpo_config"),
        source_of("transformers.training_args"),
    ]
    # Messages are written over several lines: join the pieces of implicitly concatenated strings.
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in files)
    for message in messages:
        if not message.startswith(elsewhere):
            parts = [part.strip() for part in message.split("...") if len(part.strip()) > 4]
            assert parts and all(part in source for part in parts), message


def source_of(module: str) -> Path:
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")


def test_the_metrics_in_troubleshooting_are_logged():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:group|rollout|tools|stop|time|tokens)/[\w]+)`", text))
    source = (ROOT / "src" / "agent_r1_trl" / "trainers" / "metrics.py").read_text(encoding="utf-8")
    reasons = {f"stop/{reason.value}" for reason in StopReason}
    assert len(named) > 5
    assert all(name in reasons or f'"{name}"' in source for name in named), named


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_of_ours_that_a_page_names_has_these_flags(page, capsys):
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"(?:`|^ +|\$ )agent-r1-trl ([a-z][^`\n#]*)", text, re.MULTILINE)
    for line in lines:
        command, *arguments = line.split()
        assert command in find_commands(), f"{page_id(page)}: agent-r1-trl {line}"
        flags = [argument for argument in arguments if argument.startswith("--")]
        if flags:
            with contextlib.suppress(SystemExit):  # argparse ends so
                main([command, *(word for word in arguments[:1] if word == "compare"), "--help"])
            known = capsys.readouterr().out
            if "(agent-r1-trl train --help)" in known:  # it reads those as well
                with contextlib.suppress(SystemExit):
                    main(["train", "--help"])
                known += capsys.readouterr().out
            assert all(flag in known for flag in flags), f"{page_id(page)}: agent-r1-trl {line}"


def test_the_script_of_the_readme_trains(tmp_path, monkeypatch, tiny_model_folder):
    """As printed, but for the model and the length of the run, on whatever machine this is."""
    ((line, source),) = code_blocks(ROOT / "README.md", "python")
    for printed, here in {
        '"Qwen/Qwen2.5-1.5B-Instruct"': repr(str(tiny_model_folder)),
        "max_steps=200": "max_steps=1",
        "max_tokens_per_turn=256": "max_tokens_per_turn=16",
    }.items():
        assert source.count(printed) == 1, f"the script of the README no longer contains {printed}"
        source = source.replace(printed, here)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    exec(compile("\n" * (line - 1) + source, "README.md", "exec"), namespace)
    assert namespace["trainer"].state.global_step == 1
    (recorded,) = (tmp_path / "outputs" / "my-agent" / "trajectories").glob("step_000001.jsonl")
    assert len(recorded.read_text(encoding="utf-8").splitlines()) == 2 * 8, "as its comment says"
    assert (tmp_path / "outputs" / "my-agent" / "adapter_config.json").exists(), "for chat and push"


@pytest.fixture
def tiny_model_folder(tmp_path):
    """An untrained two-layer Qwen2 with a small tokenizer of the Qwen family."""
    from agent_r1_trl.testing import make_policy, make_tokenizer

    tokenizer = make_tokenizer("qwen2_5")
    folder = tmp_path / "tiny-model"
    make_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

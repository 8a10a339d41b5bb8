"""Which files of an output directory are sent: those that are listed here, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KINDS: dict[str, tuple[str, ...]] = {
    "weights": (
        "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json",
        "adapter_model.safetensors", "adapter_model.bin",
    ),
    "configuration": ("config.json", "generation_config.json", "adapter_config.json"),
    "code of the model": ("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
    "tokenizer and template": (
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
        "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json",
    ),
    "recipe": ("recipe.yaml",),
    "evaluation": ("evaluation.json", "evaluation.md", "evaluation.csv"),
    "card": ("README.md", "training_curves.png", "LICENSE", "LICENSE.txt"),
}  # fmt: skip
"""What it is -> patterns of names in the directory."""
CRITIC = ("critic/*.safetensors", "critic/*.json")


@dataclass(frozen=True)
class Sent:
    """A file that is sent."""

    path: Path
    name: str
    """In the repository."""
    kind: str

    @property
    def size(self) -> int:
        """In bytes."""
        return self.path.stat().st_size


def files_of_model(folder: Path, *, critic: bool = False) -> list[Sent]:
    """The files of a trained model.

    Args:
        folder: output directory of a run, or of a saved model.
        critic: whether the critic is sent as well.

    Raises:
        ValueError: there is no model, or no critic; says where one may be.
    """
    kinds = KINDS | ({"critic": CRITIC} if critic else {})
    sent = [
        Sent(path, path.relative_to(folder).as_posix(), kind)
        for kind, patterns in kinds.items()
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    ]
    if not any(item.kind == "weights" for item in sent) or not any(item.kind == "configuration" for item in sent):
        raise ValueError(_no_model(folder))
    if critic and not any(item.kind == "critic" for item in sent):
        raise ValueError(
            f"critic: {folder} has none (critic/critic.safetensors); only PPO trains one, and writes it beside the "
            "model. Leave --critic out."
        )
    return sent


def _no_model(folder: Path) -> str:
    """Why a directory holds no model that can be sent, and what to do."""
    if not folder.is_dir():
        return f"{str(folder)!r}: no such directory. Pass the output directory of a run."
    if any(folder.glob("*/*_model_states.pt")):
        return (
            f"{str(folder)!r} holds the shards of DeepSpeed and no model. Write one first: agent-r1-trl merge "
            f"{folder} --output_dir {folder}-merged"
        )
    inside = sorted(
        (item.parent for item in folder.glob("checkpoint-*/*config.json") if item.name in KINDS["configuration"]),
        key=lambda path: (len(path.name), path.name),
    )
    hint = f" Did you mean {str(inside[-1])!r}?" if inside else ""
    return (
        f"{str(folder)!r}: no weights with their configuration are in it. Pass a directory that save_model or a "
        f"checkpoint wrote.{hint}"
    )


def left_out(folder: Path, sent: list[Sent]) -> list[str]:
    """Names at the top of a directory of which nothing is sent."""
    tops = {item.name.split("/")[0] for item in sent}
    return sorted(
        f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir() if path.name not in tops
    )

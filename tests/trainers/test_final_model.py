"""The model at the end of a run."""

from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trainers.checkpoints import save_final_model
from tests.trainers.helpers import make_trainer


def test_the_critic_stands_beside_the_model(tmp_path):
    trainer = make_trainer(tmp_path, trainer=MultiTurnPPOTrainer, critic="head", num_generations=1)
    assert save_final_model(trainer, str(tmp_path)) is None
    for name in ("config.json", "model.safetensors", "tokenizer.json", "critic/critic.safetensors"):
        assert (tmp_path / name).is_file()


def test_a_model_that_does_not_fit_on_the_disk_is_said_and_not_raised(tmp_path):
    trainer = make_trainer(tmp_path)

    def write_nothing(folder, **options):
        raise OSError(28, "No space left on device")

    trainer.model.save_pretrained = write_nothing
    assert "No space left" in save_final_model(trainer, str(tmp_path))

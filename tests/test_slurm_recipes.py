"""The commands and scripts of recipes/slurm: they parse, their options exist, and they start what the page says.

Covered: the scripts with stand-ins for `srun`, `scontrol`, `accelerate` and `vllm`; the list that the servers join and
leave. Not covered: a Slurm cluster, which no test has.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from agent_r1_trl.cli import main
from agent_r1_trl.generation.vllm.server_file import ServerFile
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes" / "slurm"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.replace("\\\n", " ") for line in re.findall(r"^    ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)]

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="the scripts are for Linux")


# -------------------------------------------------------------------- stand-ins

SCONTROL = """#!/bin/bash
echo node-a; echo node-b
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
ACCELERATE = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["STARTED"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
VLLM = f"""#!{sys.executable}
import http.server, json, os, sys
with open(os.environ["STARTED"], "a") as file:
    file.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(1)
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((option("--host"), int(option("--port"))), Health).serve_forever()
"""


@pytest.fixture
def environment(tmp_path):
    """In which the stand-ins come first; what they were started with goes to the file `STARTED`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "accelerate": ACCELERATE, "vllm": VLLM}.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "STARTED": str(tmp_path / "started")}
    slurm = {
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_GPUS_ON_NODE": "8",
    }
    return os.environ | own | slurm


def started(environment):
    """What the stand-ins were started with, so far."""
    path = Path(environment["STARTED"])
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# -------------------------------------------------------------------- what is written


def flags_of_train():
    with contextlib.suppress(SystemExit):  # argparse ends so
        main(["train", "--help"])


def check_launch(words, known_flags):
    """A command of `accelerate launch`: its own options parse, its file exists, and `train` has the others."""
    known = launch_command_parser().parse_args(words)
    assert known.module and known.training_script == "agent_r1_trl.cli.train"
    assert (ROOT / known.config_file).exists()
    missing = [word for word in known.training_script_args if word.startswith("--") and word not in known_flags]
    assert not missing
    return known


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.read_text(encoding="utf-8").startswith("#!/bin/bash\n#"), "it says what it does"


def test_the_commands_of_the_page_name_options_and_files_that_exist(capsys):
    flags_of_train()
    known_flags = capsys.readouterr().out
    launches = [shlex.split(command) for command in COMMANDS if command.startswith("accelerate launch")]
    assert len(launches) == 2
    files = [check_launch(words[2:], known_flags).config_file for words in launches]
    assert [Path(file).stem for file in files] == ["zero3", "multi_node_zero3"]
    scripts = [word for command in COMMANDS for word in shlex.split(command) if word.startswith("recipes/slurm/")]
    assert {ROOT / script for script in scripts} == set(SCRIPTS)


def test_the_installed_vllm_has_the_options():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    from vllm_release import Release
    from vllm_uses import Use

    text = (FOLDER / "serve_node.sh").read_text(encoding="utf-8").split("vllm serve", 2)[-1] + " ".join(COMMANDS)
    options = set(re.findall(r"--[a-z-]+", text.split("&\n")[0])) | {"--dtype", "--max-model-len"}
    assert len(options) > 6
    uses = [Use("option", "", option) for option in sorted(options)]
    assert Release(Path(spec.origin).parents[1]).lacks(uses) == []


# -------------------------------------------------------------------- training


@pytest.mark.parametrize("config", ["multi_node_zero3", "multi_node_fsdp2"])
def test_every_node_starts_its_part_of_one_training(environment, capsys, config):
    if config != "multi_node_zero3":
        environment["ACCELERATE_CONFIG"] = f"recipes/accelerate_configs/{config}.yaml"
    own = ["--config", "a recipe.yaml", "--servers.urls_file", "servers.txt"]
    subprocess.run(["bash", FOLDER / "train.sbatch", *own], check=True, env=environment, cwd=ROOT)
    flags_of_train()
    known_flags = capsys.readouterr().out
    nodes = [check_launch(words[1:], known_flags) for words in started(environment)]
    assert [node.machine_rank for node in nodes] == [0, 1]
    for node in nodes:
        assert Path(node.config_file).stem == config
        assert (node.main_process_ip, node.num_machines, node.num_processes) == ("node-a", 2, 16)
        assert node.main_process_port == 24711
        beside = ["--use_vllm", "--vllm_mode", "server", "--resume_from_checkpoint", "true"]
        assert node.training_script_args == [*beside, *own]


# -------------------------------------------------------------------- serving


@contextlib.contextmanager
def serving(environment, list_file, *options):
    """The script with two servers on this machine; their URLs."""
    port = free_port()
    environment = environment | {"FIRST_PORT": str(port), "ADDRESS": "127.0.0.1", "GPUS": "4", "GPUS_PER_SERVER": "2"}
    process = subprocess.Popen(
        ["bash", FOLDER / "serve_node.sh", "my model", list_file, *options], env=environment, start_new_session=True
    )
    try:
        yield process, [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 2}"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(urls, list_file):
    deadline = time.monotonic() + 60
    while sorted(ServerFile(list_file).read()) != sorted(urls):
        assert time.monotonic() < deadline, list_file.read_text() if list_file.exists() else "there is no list"
        time.sleep(0.1)


def answers(url):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.slow
def test_servers_are_in_the_list_while_they_answer(environment, tmp_path):
    list_file = tmp_path / "servers.txt"
    list_file.write_text("http://10.0.0.9:8000\n", encoding="utf-8")
    with serving(environment, list_file, "--max-model-len", "64") as (process, urls):
        wait_until(["http://10.0.0.9:8000", *urls], list_file)
        assert all(map(answers, urls))
        found = sorted(started(environment), key=lambda item: item[1]["CUDA_VISIBLE_DEVICES"])
        assert [variables["CUDA_VISIBLE_DEVICES"] for _, variables in found] == ["0,1", "2,3"]
        for (words, variables), url in zip(found, urls, strict=True):
            assert words[:2] == ["serve", "my model"] and words[-2:] == ["--max-model-len", "64"]
            assert words[words.index("--port") + 1] == url.rpartition(":")[2]
            assert words[words.index("--tensor-parallel-size") + 1] == "2"
            assert variables["VLLM_SERVER_DEV_MODE"] == "1"
        process.terminate()
        assert process.wait(30) is not None
        assert ServerFile(list_file).read() == ["http://10.0.0.9:8000"]
        assert not any(map(answers, urls)), "nothing runs on"


@pytest.mark.slow
def test_a_server_that_dies_leaves_the_list_and_the_others_stay(environment, tmp_path):
    list_file = tmp_path / "servers.txt"
    with serving(environment, list_file) as (process, urls):
        wait_until(urls, list_file)
        connection = http.client.HTTPConnection(urls[0].removeprefix("http://"), timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/end")
            connection.getresponse()
        wait_until(urls[1:], list_file)
        assert process.poll() is None and answers(urls[1])

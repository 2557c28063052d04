"""`privrep federate` and `privrep node`: what a config says, what commands refuse, and what they hand on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("flwr")

import commands
from commands import run
from configs import FEDERATED_NETWORK as NEURAL
from configs import FEDERATED_TABLE as TABLE
from privrep.cli import federated_demo as demo
from privrep.data.synthetic import make_population
from privrep.errors import InputError
from privrep.federated.config import FederateConfig, FederationSettings, read_config
from privrep.federated.credentials import ServerTls, make_keys
from privrep.federated.simulation import split_by_user
from privrep.federated.task import TableTask
from privrep.federated.wire import travelling
from privrep.heads.fitting import fit_heads
from privrep.linear.method import Method
from privrep.linear.registry import METHODS, find_method
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.learning import learn
from privrep.privacy.ledger import read_report
from privrep.users.memory import InMemoryUsers

refused = partial(commands.refused, remarks=True)  # that there are no keys


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands say where Flower's home is; afterwards it is where it was."""
    monkeypatch.setenv("FLWR_HOME", os.environ.get("FLWR_HOME", ""))


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "federate.toml"
    path.write_text(text)
    return path


def read(tmp_path: Path, text: str) -> FederateConfig:
    return read_config(config(tmp_path, text))


# The file


def test_a_table_is_read_with_the_defaults_of_a_fit(tmp_path: Path) -> None:
    found = read(tmp_path, TABLE)
    task: Any = found.task
    assert task.config == Config(rank=None, epsilon=4.0, delta=1e-6)
    assert task.columns == Columns("user", ("y",), ("x0", "x1", "x2"))
    assert found.settings == FederationSettings()
    assert (found.host, found.port, found.keys) == ("127.0.0.1", 9092, None)


def test_everything_a_table_may_say(tmp_path: Path) -> None:
    text = TABLE.replace("epsilon = 4", 'epsilon = 4\nrelation = "add-or-remove-one-user"\nseed = 3') + (
        'task = "classification"\nclasses = ["b", "a"]\nloss = "hinge"\nrank = 2\nstart = "spectral"\n'
        "intercept = false\nsafety_net = false\nscale = {x0 = 1, x1 = 2.5, x2 = 3}\n[federation]\nmin_users = 20\n"
        'min_nodes = 3\nwait = 60\nround_timeout = 5.5\nresend = 2\npoll = 0.1\nnoise = "nodes"\nnoise_nodes = 2\n'
        'server_epsilon = 9.0\nmost_users = 50\n[server]\nhost = "192.0.2.7"\nport = 0\nkeys = "my/keys"\n'
    )
    found = read(tmp_path, text)
    task: Any = found.task
    assert task.config == Config(
        rank=2,
        epsilon=4.0,
        delta=1e-6,
        relation="add-or-remove-one-user",
        intercept=False,
        safety_net=False,
        scale=(1.0, 2.5, 3.0),
        seed=3,
        start="spectral",
        loss="hinge",
    )
    assert task.columns.classes == ("a", "b")
    assert found.settings == FederationSettings(20, 3, 60, 5.5, 2, 0.1, "nodes", 2, 9.0, 50)
    assert (found.host, found.port, found.keys) == ("192.0.2.7", 0, tmp_path / "my/keys")


def test_several_targets_and_categories(tmp_path: Path) -> None:
    text = TABLE.replace('"y"', '["y", "z"]') + 'categories = {colour = ["red", "green"], size = [1, 2, 3]}\n'
    task: Any = read(tmp_path, text).task
    assert task.columns.targets == ("y", "z")
    assert task.columns.by_category == {"colour": ("red", "green"), "size": (1, 2, 3)}
    assert task.features == 8


def test_a_network_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = NEURAL + (
        'share = "linear"\nnetwork = "mlp"\nfeatures = "dct"\nkeep = 20\nrows = 16\n'
        "[training]\nrounds = 4\nclip = 0.5\n"
    )
    task: Any = read(tmp_path, text).task
    assert (task.classes, task.epsilon, task.delta, task.share) == (3, 2.0, 1e-5, "linear")
    assert (task.representation, task.image, task.rows, task.rounds) == ("mlp", (8, 8, 1), 16, 4)
    assert task.feature_map.to_json()["keep"] == 20
    assert dict(task.training) == {"clip": 0.5}
    columns = 'columns = {user = "u", target = "t", features = ["a", "b"]}\n'
    task = read(tmp_path, NEURAL.replace("image = [8, 8, 1]\n", columns)).task
    assert task.columns == Columns("u", ("t",), ("a", "b"))


# Commands


class Recorder:
    """In place of what runs a federation: remembers what it was given, and writes what a command reads afterwards."""

    def __init__(self, ledger: Callable[[Path], None], stop: bool = False) -> None:
        self.given: dict[str, Any] = {}
        self._ledger, self._stop = ledger, stop

    def serve(self, task: Any, folder: Path, settings: FederationSettings, **others: Any) -> None:
        self.given = {"task": task, "folder": folder, "settings": settings, **others}
        if self._stop:
            raise KeyboardInterrupt
        self._ledger(folder)
        others["say"]("nodes: north, south")
        others["on_page"]("round-1")

    def simulate(self, task: Any, data: list[Path], folder: Path, settings: FederationSettings, **others: Any) -> None:
        rows = [pq.read_table(path).to_pydict() for path in data]
        self.serve(task, folder, settings, rows=rows, **others)

    def join(self, address: str, data: Path, folder: Path, **others: Any) -> None:
        self.given = {"address": address, "data": data, "folder": folder, **others}
        if self._stop:
            raise KeyboardInterrupt


def write_ledger(folder: Path) -> None:
    """Of a run of forty users."""
    rng = np.random.default_rng(0)
    table = make_population(rng, 40, 3, 1, 4, 0.1).sample(rng)
    learn(InMemoryUsers(table), Config(rank=1, epsilon=4.0, delta=1e-6, seed=0), folder=folder)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(write_ledger)
    for module in ("server", "node", "simulation"):
        put(monkeypatch, module, made)
    return made


def put(monkeypatch: pytest.MonkeyPatch, module: str, made: Recorder) -> None:
    fake = SimpleNamespace(serve=made.serve, simulate=made.simulate, join=made.join, split_by_user=split_by_user)
    monkeypatch.setitem(sys.modules, f"privrep.federated.{module}", fake)


def test_serve_hands_on_keys_and_says_what_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorder: Recorder
) -> None:
    keys, out = tmp_path / "keys", tmp_path / "out"
    code, printed, _ = run(capsys, "federate", "keys", keys, "--node", "north", "--node", "south")
    assert code == 0
    assert f"Node north: carry {keys / 'carry' / 'north'}" in printed
    path = config(tmp_path, TABLE + "[server]\nport = 4321\nkeys = 'keys'\n")
    code, printed, said = run(capsys, "federate", "serve", path, "--out", out)
    assert code == 0
    given = recorder.given
    assert given["tls"] == ServerTls(keys / "ca.pem", keys / "server.pem", keys / "server.key")
    assert list(given["node_keys"]) == ["north", "south"]
    assert all(key.startswith(b"-----BEGIN PUBLIC KEY-----") for key in given["node_keys"].values())
    assert (given["host"], given["port"], given["folder"]) == ("127.0.0.1", 4321, out)
    assert "Nodes that may join: north, south" in said
    spent = read_report(out / "ledger.jsonl").epsilon
    assert 0 < spent <= 4
    assert f"nodes: north, south\nround 1: epsilon {spent:.3f} spent" in said
    assert f"Privacy: epsilon {spent:.4g} of 4 spent, delta 1e-06, user level, replace-one-user" in printed
    assert "INSECURE" not in printed
    assert Path(os.environ["FLWR_HOME"]) == tmp_path / "out.federation" / "flower"


def test_a_simulation_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], recorder: Recorder) -> None:
    path = config(tmp_path, TABLE.replace("epsilon = 4", "epsilon = 4\nseed = 0"))
    code, printed, _ = run(capsys, "federate", "serve", path, "--out", tmp_path / "out", "--insecure")
    assert code == 0
    assert "NOT PRIVATE" in printed
    assert "INSECURE: no TLS and no keys." in printed
    assert recorder.given["tls"] is None
    assert recorder.given["node_keys"] is None


def test_join_hands_on_what_it_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], recorder: Recorder) -> None:
    make_keys(tmp_path / "keys", tmp_path / "carry", ["north"], [])
    data, folder, carried = tmp_path / "rows.parquet", tmp_path / "node", tmp_path / "carry" / "north"
    joining = ["federate", "join", "[::1]:9092", "--data", data, "--folder", folder]
    with_keys = [*joining, "--key", carried / "node.key", "--ca", carried / "ca.pem"]
    assert f"there is no file {data}" in refused(capsys, *with_keys)
    data.touch()
    code, printed, _ = run(capsys, *with_keys)
    assert code == 0
    given = recorder.given
    assert (given["address"], given["data"], given["folder"]) == ("[::1]:9092", data, folder)
    assert (given["key"], given["ca"], given["insecure"]) == (carried / "node.key", carried / "ca.pem", False)
    assert (given["agreed"], given["simulation"]) == (None, False)
    assert f"privrep node predict {folder}" in printed
    agreed = config(tmp_path, TABLE + '[federation]\nnoise = "nodes"\nnoise_nodes = 2\n')
    assert run(capsys, *with_keys, "--agreed", agreed, "--simulation")[0] == 0
    given = recorder.given
    assert given["agreed"].task == read_config(agreed).task
    assert given["agreed"].noise["epsilon"] > given["agreed"].task.epsilon  # two nodes make up the noise
    assert given["simulation"]
    assert "there is no file" in refused(capsys, *with_keys, "--agreed", tmp_path / "none.toml")
    assert "leave it, or --key and --ca, out" in refused(capsys, *with_keys, "--insecure")
    (carried / "node.key").chmod(0o644)
    assert "others can read" in refused(capsys, *with_keys)


def test_stopping_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Recorder(write_ledger, stop=True)
    put(monkeypatch, "server", stopped)
    put(monkeypatch, "node", stopped)
    path, data = config(tmp_path, TABLE), tmp_path / "rows.parquet"
    data.touch()
    code, _, said = run(capsys, "federate", "serve", path, "--out", tmp_path / "out", "--insecure")
    assert code == 130
    assert "run the same command to continue; nothing is spent twice" in said
    folder = tmp_path / "node"
    code, _, said = run(capsys, "federate", "join", "127.0.0.1:9", "--data", data, "--folder", folder, "--insecure")
    assert code == 130
    assert said.startswith("privrep: stopped; run the same command to go on")


@pytest.mark.parametrize(
    "command",
    [
        ["keys", "k", "--node", "a"],
        ["serve", "c.toml", "--out", "o"],
        ["join", "localhost:1", "--data", "d", "--folder", "f"],
        ["simulate", "c.toml", "--data", "d", "--out", "o"],
        ["demo", "--out", "o"],
    ],
)
def test_without_flower_the_sentence_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert "pip install --constraint constraints.txt '.[federated]'" in refused(capsys, "federate", *command)
    assert list(tmp_path.iterdir()) == []


def test_the_program_itself_loads_neither_flower_nor_torch() -> None:
    heavy = "{'flwr', 'torch', 'cryptography', 'numpy'} & set(sys.modules)"
    code = f"import sys; import privrep.cli.app; print(sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_flower_is_quiet_whatever_the_environment_says(tmp_path: Path) -> None:
    """In a process of its own, with an operator's environment that has everything on."""
    code = f"""
from pathlib import Path
from unittest import mock
from privrep.cli.federate import _need_flower
_need_flower(Path({str(tmp_path)!r}) / "run")
from flwr.supercore import telemetry, update_check, utils
from flwr.superlink.cli.flower_superlink import _runtime_dependency_install_default as installs
with mock.patch("urllib.request.urlopen") as sent:
    told = telemetry.create_event(telemetry.EventType.PING, None)
with mock.patch.object(update_check.threading, "Thread") as thread:
    update_check.warn_if_flwr_update_available("flower-superlink")
print(told, sent.called, thread.called, installs(), utils.get_flwr_home())
"""
    on = {"FLWR_TELEMETRY_ENABLED": "1", "FLWR_DISABLE_UPDATE_CHECK": "0", "FLWR_HOME": str(tmp_path / "elsewhere")}
    asked = [sys.executable, "-c", code]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, env={**os.environ, **on})
    assert done.stdout == f"disabled False False False {tmp_path / 'run' / 'flower'}\n"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("module", ["node", "server", "apps", "simulation", "wire.messages", "wire.in_process"])
def test_whoever_imports_a_part_of_a_federation_silences_flower_first(module: str) -> None:
    code = (
        f"import privrep.federated.{module}\n"
        "from flwr.supercore import telemetry\n"
        "print(telemetry.FLWR_TELEMETRY_ENABLED)"
    )
    on = {**os.environ, "FLWR_TELEMETRY_ENABLED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=on)
    assert done.stdout == "0\n"


# Files dealt to nodes


def make_rows(users: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    table = make_population(rng, users, 3, 1, 4, 0.1).sample(rng)
    order = rng.permutation(table.n_rows)
    columns = {"user": np.repeat(table.ids, table.sizes), "y": table.y}
    return {name: v[order] for name, v in (columns | {f"x{j}": table.X[:, j] for j in range(3)}).items()}


def test_simulate_deals_whole_users(tmp_path: Path, capsys: pytest.CaptureFixture[str], recorder: Recorder) -> None:
    path, data, out = config(tmp_path, TABLE), tmp_path / "rows.parquet", tmp_path / "out"
    pq.write_table(pa.table(make_rows(10)), data)
    code, printed, _ = run(capsys, "federate", "simulate", path, "--data", data, "--nodes", "3", "--out", out)
    assert code == 0
    assert f"Model: {out}" in printed
    parts = [set(rows["user"]) for rows in recorder.given["rows"]]
    assert parts == [{0, 3, 6, 9}, {1, 4, 7}, {2, 5, 8}]
    assert [len(rows["user"]) for rows in recorder.given["rows"]] == [16, 12, 12]
    said = refused(capsys, "federate", "simulate", path, "--data", data, "--nodes", "11", "--out", tmp_path / "other")
    assert "has 10 users, fewer than 11 nodes" in said


def test_simulate_runs_a_whole_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing in place of anything: the model equals that of one fit, and every node has its users' heads."""
    seeded = TABLE.replace("epsilon = 4", "epsilon = 4\nseed = 0") + "rank = 1\n"
    path, data, out = config(tmp_path, seeded), tmp_path / "rows.parquet", tmp_path / "out"
    pq.write_table(pa.table(make_rows(60)), data)
    code, printed, said = run(capsys, "federate", "simulate", path, "--data", data, "--nodes", "3", "--out", out)
    assert code == 0
    assert "NOT PRIVATE" in printed
    assert "3 nodes with 60 users take part" in said
    task: Any = read(tmp_path, seeded).task
    with task.open(data) as users:
        alone = learn(users, task.config)
    fitted = models.load(out)
    assert fitted.heads is None
    assert np.array_equal(fitted.representation.matrix, alone.representation.matrix)
    assert fitted.privacy == alone.privacy
    nodes = [models.load(folder / "model").heads for folder in sorted((tmp_path / "out.nodes").iterdir())]
    assert [heads.ids.tolist() for heads in nodes if heads is not None] == [list(range(n, 60, 3)) for n in range(3)]


def test_each_of_several_files_is_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorder: Recorder
) -> None:
    path, files = config(tmp_path, TABLE), [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file in files:
        pq.write_table(pa.table(make_rows(4)), file)
    both = ["--data", files[0], "--data", files[1]]
    assert run(capsys, "federate", "simulate", path, *both, "--out", tmp_path / "out")[0] == 0
    assert len(recorder.given["rows"]) == 2
    assert "Leave it out" in refused(
        capsys, "federate", "simulate", path, *both, "--nodes", "3", "--out", tmp_path / "other"
    )
    missing = tmp_path / "none.csv"
    assert f"there is no file {missing}" in refused(
        capsys, "federate", "simulate", path, "--data", missing, "--out", tmp_path / "other"
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_dealing_keeps_every_row_as_it_is(tmp_path: Path, suffix: str) -> None:
    rows = {"user": ["007", "b", "007", "ä,b", "c"], "y": [1.5, 2.0, -3.0, 0.1, 7.0]}
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table(rows), path)
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(rows), *zip(*rows.values(), strict=True)])
    parts = split_by_user(path, "user", 2, tmp_path)
    found = []
    for part in parts:
        if suffix == ".parquet":
            table = pq.read_table(part).to_pydict()
            found.append(list(zip(table["user"], map(str, table["y"]), strict=True)))
        else:
            with open(part, newline="", encoding="utf-8") as file:
                header, *lines = csv.reader(file)
            assert header == ["user", "y"]
            found.append([(line[0], line[1]) for line in lines])
    assert found == [[("007", "1.5"), ("007", "-3.0"), ("c", "7.0")], [("b", "2.0"), ("ä,b", "0.1")]]


def test_dealing_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    arrays = {"users": np.array([5, 2, 5, 9]), "X": np.arange(8.0).reshape(4, 2), "classes": np.array(["a", "b"])}
    np.savez(path, **arrays)
    parts = [dict(np.load(part)) for part in split_by_user(path, "users", 2, tmp_path)]
    assert [part["users"].tolist() for part in parts] == [[2, 9], [5, 5]]
    assert [part["X"][:, 0].tolist() for part in parts] == [[2.0, 6.0], [0.0, 4.0]]
    assert all(part["classes"].tolist() == ["a", "b"] for part in parts)
    with pytest.raises(InputError, match="has no list 'writers'"):
        split_by_user(path, "writers", 2, tmp_path)


# On a node


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    """As `federate join` leaves it: an ordinary model folder, with the heads of this node's users alone."""
    folder, rows = tmp_path / "node", make_rows(60)
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    task: Any = read(tmp_path, TABLE).task
    with task.open(tmp_path / "rows.parquet") as users:
        task.learn(users, folder / "model", lambda page: None)
        assert task.keep(folder / "model", users) == 60
    return folder


def test_node_predicts_and_personalizes_with_the_server_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], node_folder: Path
) -> None:
    rows, out = tmp_path / "rows.parquet", tmp_path / "predicted.parquet"
    code, printed, _ = run(capsys, "node", "predict", node_folder, rows, "--out", out)
    assert code == 0
    assert "240 rows" in printed
    model = models.load(node_folder / "model")
    assert model.heads is not None
    found, given = pq.read_table(out).to_pydict(), make_rows(60)
    X = np.column_stack([given[f"x{j}"] for j in range(3)])
    expected = model.heads.predict(model.representation, X, np.asarray(given["user"]))
    np.testing.assert_allclose(found["prediction"], expected, atol=1e-12)
    new = make_rows(5, seed=1)
    pq.write_table(pa.table({**new, "user": new["user"] + 100}), tmp_path / "new.parquet")
    code, printed, _ = run(capsys, "node", "personalize", node_folder, tmp_path / "new.parquet")
    assert code == 0
    assert "Users: 5 more, 65 in all" in printed
    after = models.load(node_folder / "model")
    assert after.heads is not None
    assert len(after.heads.ids) == 65


def test_a_node_without_a_model_is_told_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "node", "predict", tmp_path, tmp_path / "rows.csv", "--out", tmp_path / "p.csv")
    assert "receive it with: privrep federate join" in said


def test_a_neural_model_on_a_node_names_its_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "node" / "model"
    model.mkdir(parents=True)
    (model / "model.json").write_text(json.dumps({"format": "privrep-neural/1"}))
    said = refused(capsys, "node", "predict", tmp_path / "node", tmp_path / "r.csv", "--out", tmp_path / "p.csv")
    assert "Centaur.load(" in said


# The demo


def test_the_demo_writes_over_a_demo_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    said = refused(capsys, "federate", "demo", "--out", tmp_path, "--overwrite")
    assert "holds no demo" in said
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_the_demo_started_is_stopped_whatever_happens(tmp_path: Path) -> None:
    stubborn = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(15, lambda *_: None); print(1); time.sleep(60)",
    ]
    commands = {"server": ["sleep", "60"], "north": ["sleep", "60"], "south": stubborn}
    started: list[Any] = []

    def interrupted() -> None:
        with demo._processes(commands, tmp_path) as running:
            started.extend(running.values())
            while not (tmp_path / "south.log").read_bytes():
                time.sleep(0.01)
            raise KeyboardInterrupt

    patience, demo.GRACE = demo.GRACE, 0.3
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        demo.GRACE = patience
    assert [process.returncode for process in started] == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL]
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_process_that_fails_ends_the_demo_with_its_sentence(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('privrep: the server refuses this key.')"]
    with demo._processes({"north": failing}, tmp_path) as running:
        running["north"].wait()
        with pytest.raises(InputError, match=r"north ended with an error: the server refuses this key\."):
            demo._check(running, tmp_path)


def test_the_config_of_the_demo_is_one(tmp_path: Path) -> None:
    found = read(tmp_path, demo._config(4321))
    task: Any = found.task
    assert (found.port, found.keys, found.settings.min_nodes) == (4321, tmp_path / "keys", 3)
    assert task.config == Config(rank=demo.RANK, epsilon=demo.EPSILON, delta=demo.DELTA)
    rng = np.random.default_rng(0)
    population = make_population(rng, 600, 10, 2, 8, 0.1)
    parts = demo._parts(population.sample(rng))
    assert [part.n_users for part in parts.values()] == [300, 200, 100]
    heads = fit_heads(parts["west"].blocks(), learn(InMemoryUsers(parts["west"]), task.config).representation)
    assert heads.ids.tolist() == list(range(500, 600))


# What cannot be federated is refused before anything is charged


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> str:
    """Return the refusal of `serve --check`, and hold `serve` and `simulate` to the same one."""
    path, folder = config(tmp_path, text), tmp_path / "run"
    said = refused(capsys, "federate", "serve", path, "--check")
    pq.write_table(pa.table({"user": [1], "y": [1.0]}), tmp_path / "rows.parquet")
    assert refused(capsys, "federate", "serve", path, "--out", folder, "--insecure") == said
    assert refused(capsys, "federate", "simulate", path, "--data", tmp_path / "rows.parquet", "--out", folder) == said
    assert not (folder / "ledger.jsonl").exists()
    return said


def test_a_method_whose_steps_no_node_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [name for name in travelling.STEPS if not name.endswith(":ModelUpdate")]
    monkeypatch.setattr(travelling, "STEPS", tuple(known))
    said = check(tmp_path, capsys, TABLE + 'method = "fedavg"\n')
    assert "the method fedavg cannot be federated: nodes do not know its ModelUpdate" in said
    with pytest.raises(InputError, match="nodes do not know its ModelUpdate"):
        TableTask(Config(1, 1.0, 1e-6, method="fedavg"), Columns("user", ("y",), ("x",)))


@pytest.mark.parametrize("method", [*METHODS.values(), find_method("", ratings=True)], ids=lambda each: str(each.name))
def test_nodes_know_the_steps_of_every_registered_method(method: Method) -> None:
    assert travelling.list_left_behind(method) == []


def test_targets_that_a_method_does_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = TABLE.replace('target = "y"', 'target = ["y", "z"]') + 'method = "fedavg"\n'
    assert "fedavg takes one target" in check(tmp_path, capsys, two)


def test_categories_are_dense_where_a_method_takes_no_sparse_rows() -> None:
    columns = Columns("user", ("y",), ("x",), ("shop",), (tuple(f"s{number}" for number in range(300)),))
    assert not TableTask(Config(1, 1.0, 1e-6, method="fedavg"), columns).sparse
    assert TableTask(Config(1, 1.0, 1e-6), columns).sparse


def test_samples_and_noise_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    text = NEURAL + '[training]\nrounds = 4\nrate = 0.5\n[federation]\nnoise = "nodes"\n'
    assert "a secret sample (rate 0.5) do not go with noise of the nodes" in check(tmp_path, capsys, text)

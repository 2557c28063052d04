"""Every configuration by one machinery: unknown keys, missing keys, wrong values, and names that the code has, too."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from privrep.errors import InputError
from privrep.schema.clip import PairsConfig
from privrep.schema.commands import FederateFile, Federation, FitConfig, NeuralConfig
from privrep.schema.machinery import Configuration, choices_of
from privrep.schema.sections import Network, Relation, Share, Training

FIT: dict[str, Any] = {
    "data": {"table": "rows.csv"},
    "columns": {"user": "u", "target": "y"},
    "privacy": {"epsilon": 1, "delta": 1e-6},
}
NEURAL: dict[str, Any] = {
    "data": {"kind": "npz", "path": "images.npz"},
    "users": {"by": "writers"},
    "privacy": {"epsilon": 1.0, "delta": 1e-6},
    "model": {"classes": 3},
}
CLIP: dict[str, Any] = {
    "data": {"kind": "features", "path": "train.npz", "unit": "pair"},
    "privacy": {"epsilon": 1.0},
}
FEDERATE: dict[str, Any] = {
    "privacy": {"epsilon": 1, "delta": 1e-6},
    "model": {"kind": "table", "user": "u", "target": "y", "features": ["x0"]},
}
WHOLE: dict[str, tuple[type[Configuration], dict[str, Any]]] = {
    "fit": (FitConfig, FIT),
    "fit-neural": (NeuralConfig, NEURAL),
    "fit-clip": (PairsConfig, CLIP),
    "federate": (FederateFile, FEDERATE),
}


def refusal(model: type[Configuration], found: dict[str, Any]) -> str:
    with pytest.raises(InputError) as refused:
        model.checked(found, Path("/somewhere"))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("command", WHOLE)
def test_a_config_is_read_frozen_and_keeps_whole_numbers(command: str) -> None:
    model, found = WHOLE[command]
    asked: Any = model.checked(found, Path("/somewhere"))
    assert asked.privacy.given() == found["privacy"]
    assert type(asked.privacy.epsilon) is type(found["privacy"]["epsilon"])
    with pytest.raises(ValidationError):
        asked.privacy.epsilon = 100.0


@pytest.mark.parametrize("command", WHOLE)
def test_an_unknown_key_or_section_is_refused_with_the_nearest(command: str) -> None:
    model, found = WHOLE[command]
    wrong = {**found, "privacy": {**found["privacy"], "epsilonn": 1}}
    assert refusal(model, wrong) == "the config has no key privacy.epsilonn; did you mean epsilon?"
    assert refusal(model, {**found, "privcy": {}}) == "the config has no section privcy; did you mean privacy?"
    said = refusal(model, {**found, "zzz": {}})
    assert said == f"the config has no section zzz; there are {', '.join(model.model_fields)}."


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "fit",
            "the config must say data.table (a path), columns.user (text), columns.target (the name of a column, or a "
            "list of names), privacy.epsilon (a number) and privacy.delta (a number).",
        ),
        (
            "fit-neural",
            "the config must say data.kind (text), privacy.epsilon (a number), privacy.delta (a number) and "
            "model.classes (a whole number or a list of names). Also: say who the users are: users.by = "
            '"column", "writers" or "folders" if the data tells, or users.partition = '
            "{clients = 100, classes_per_client = 5} to deal images to made-up ones.",
        ),
        ("fit-clip", "the config must say data.kind (text) and privacy.epsilon (a number)."),
        ("federate", "the config must say privacy.epsilon (a number), privacy.delta (a number) and model.kind (text)."),
    ],
)
def test_all_missing_keys_are_named_at_once(command: str, sentence: str) -> None:
    assert refusal(WHOLE[command][0], {}) == sentence


def test_missing_keys_of_a_kind_are_named_with_the_others() -> None:
    found = {"data": {"kind": "parquet", "unit": "pair", "columns": {"image": "i"}}}
    assert refusal(PairsConfig, found) == (
        'data of kind "parquet" needs data.path (a path) and data.size ([height, width]); the config must say '
        "data.columns.label (the name of a column) and privacy.epsilon (a number)."
    )
    assert refusal(FederateFile, {**FEDERATE, "model": {"kind": "table"}}) == (
        "the config must say model.user and model.target."
    )


@pytest.mark.parametrize(
    ("command", "section", "name", "value", "sentence"),
    [
        ("fit", "privacy", "epsilon", "1", "privacy.epsilon must be a number. Got '1' instead."),
        ("fit", "privacy", "epsilon", True, "privacy.epsilon must be a number. Got True instead."),
        ("fit", "privacy", "seed", 1.0, "privacy.seed must be a whole number. Got 1.0 instead."),
        ("fit", "privacy", "seed", -1, "privacy.seed must be a whole number. Got -1 instead."),
        (
            "fit",
            "privacy",
            "relation",
            "x",
            "privacy.relation must be one of replace-one-user, add-or-remove-one-user.",
        ),
        ("fit", "columns", "features", [], "columns.features must be a list of texts. Got [] instead."),
        ("fit", "columns", "features", ["a", 1], "columns.features must be a list of texts. Got ['a', 1] instead."),
        (
            "fit",
            "columns",
            "categories",
            {"a": 1},
            "columns.categories.a must be the list of its values. Got 1 instead.",
        ),
        ("fit", "columns", "categories", 3, "columns.categories must be a table. Got 3 instead."),
        ("fit", "columns", "target", [""], "columns.target must be the name of a column, or a list of names."),
        ("fit", "model", "intercept", 1, "model.intercept must be true or false. Got 1 instead."),
        ("fit", "data", "table", "", "data.table must be a path. Got '' instead."),
        ("fit", "model", "task", 3, "model.task must be text. Got 3 instead."),
        (
            "fit-neural",
            "model",
            "classes",
            0,
            "model.classes must be a whole number or a list of names. Got 0 instead.",
        ),
        ("fit-neural", "users", "partition", 3, "users.partition must be a table. Got 3 instead."),
        (
            "fit-neural",
            "data",
            "kind",
            "x",
            "data.kind must be one of idx, cifar, npz, folder, parquet. Got 'x' instead.",
        ),
        ("fit-clip", "training", "steps", 2.5, "training.steps must be a whole number. Got 2.5 instead."),
        ("fit-clip", "data", "test", [], "data.test must be a table. Got [] instead."),
        ("federate", "model", "kind", 3, 'the config must say model.kind, "table" or "neural". Got 3 instead.'),
        ("federate", "federation", "wait", "long", "federation.wait must be a number. Got 'long' instead."),
        ("federate", "server", "port", 1 << 16, "server.port must lie from 0 to 65535. Got 65536 instead."),
    ],
)
def test_a_wrong_value_is_one_sentence(command: str, section: str, name: str, value: Any, sentence: str) -> None:
    model, found = WHOLE[command]
    said = refusal(model, {**found, section: {**found.get(section, {}), name: value}})
    assert said.startswith(sentence)


@pytest.mark.parametrize("command", WHOLE)
def test_all_that_is_wrong_is_said_at_once(command: str) -> None:
    """Unknown keys, wrong values, missing keys; a missing key that an unknown one is meant for is said once."""
    model, found = WHOLE[command]
    privacy = {"epsilonn": 1, "delta": "x"}
    data = {name: section for name, section in found.items() if name != "privacy"}
    last = next(name for name in data if name != "users")
    said = refusal(model, {**data, last: {**data[last], "zzz": 1}, "privacy": privacy, "oputut": {}})
    parts = said.split(" Also: ")
    assert "the config has no key privacy.epsilonn; did you mean epsilon?" in parts
    assert "privacy.delta must be a number. Got 'x' instead." in parts
    assert any(f"{last}.zzz; there are " in part for part in parts)
    assert ("the config has no section oputut; did you mean output?" in parts) == ("output" in model.model_fields)
    assert not any("must say" in part for part in parts)
    assert len(parts) == 4


def test_missing_keys_stay_where_no_unknown_one_is_meant_for_them() -> None:
    assert refusal(FitConfig, {**FIT, "privacy": {"epsilonn": 1}}) == (
        "the config has no key privacy.epsilonn; did you mean epsilon? Also: the config must say privacy.delta, a "
        "number."
    )
    assert refusal(FitConfig, {"dta": {}, "columns": FIT["columns"], "privacy": FIT["privacy"]}) == (
        "the config has no section dta; did you mean data?"
    )


def test_settings_that_do_not_go_together_are_said_at_once() -> None:
    data = {**CLIP["data"], "templates": ["a {}"], "pairs_per_user": 2, "test": {"held_out": 3}}
    said = refusal(PairsConfig, {**CLIP, "data": data, "encoders": {"dim": 0}})
    assert len(said.split(" Also: ")) == 4
    for part in ("data.test", "data.pairs_per_user goes with", "name the classes", "encoders.dim must be 1 or more."):
        assert part in said
    both = {**NEURAL, "users": {"by": "folders"}, "model": {"classes": 3, "keep": 9}}
    assert len(refusal(NeuralConfig, both).split(" Also: ")) == 2


def test_a_config_comes_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said in ((b"[privacy]\nepsilon = 'one'\n", "standard input: privacy.epsilon"), (b"[", "is not a TOML")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        with pytest.raises(InputError, match=f"standard input.*{said.split(': ')[-1]}"):
            FitConfig.read(Path("-"))
    whole = b"data.table = 'rows.csv'\ncolumns = {user = 'u', target = 'y'}\nprivacy = {epsilon = 1, delta = 1e-6}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(whole)))
    assert FitConfig.read(Path("-")).data.table == Path("rows.csv")


def test_a_key_of_another_kind_is_told_from_one_that_is_unknown() -> None:
    data = NEURAL["data"]
    assert refusal(NeuralConfig, {**NEURAL, "data": {**data, "transpose": True}}) == (
        'data of kind "npz" has no data.transpose; leave it out.'
    )
    assert refusal(NeuralConfig, {**NEURAL, "data": {**data, "pth": "x"}}) == (
        "the config has no key data.pth; did you mean path?"
    )
    assert refusal(FederateFile, {**FEDERATE, "model": {**FEDERATE["model"], "usr": "x"}}) == (
        'a model of kind "table" has no key model.usr; did you mean user?'
    )


@pytest.mark.parametrize("command", WHOLE)
def test_the_file_is_named_and_paths_are_relative_to_it(command: str, tmp_path: Path) -> None:
    model, path = WHOLE[command][0], tmp_path / "c.toml"
    path.write_text("[privacy]\nepsilon = 'one'\n")
    with pytest.raises(InputError) as refused:
        model.read(path)
    assert str(refused.value).startswith(f"{path}: privacy.epsilon must be a number. Got 'one' instead. Also: ")
    for content, words in (("[privacy\n", "is not a TOML file"), (None, "there is no file")):
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
        with pytest.raises(InputError, match=words):
            model.read(path)


def test_files_that_are_missing_are_told_and_folders_to_write_are_not(tmp_path: Path) -> None:
    found = {**CLIP, "encoders": {"cache": "cache"}, "output": {"folder": "model"}}
    data = {**CLIP["data"], "test": {"path": "test.npz"}}
    asked = PairsConfig.checked({**found, "data": data}, tmp_path)
    assert sorted(asked.missing_files()) == [tmp_path / "test.npz", tmp_path / "train.npz"]
    (tmp_path / "train.npz").touch()
    assert asked.missing_files() == [tmp_path / "test.npz"]
    assert asked.out == tmp_path / "model"


# Names that stand elsewhere, too


def test_names_are_those_of_the_code() -> None:
    from privrep.federated.config import FederationSettings, NoiseBy
    from privrep.neural import plan
    from privrep.privacy.events import RELATIONS

    assert get_args(Relation) == RELATIONS
    assert get_args(Share) == get_args(plan.Share)
    assert choices_of(Federation.model_fields["noise"].annotation) == get_args(NoiseBy)
    assert [each.name for each in fields(FederationSettings)] == list(Federation.model_fields)
    usual = FederationSettings()
    for name, value in Federation.model_fields.items():
        assert value.default in (None, getattr(usual, name)), name


def test_names_are_those_of_the_networks() -> None:
    pytest.importorskip("torch")
    from privrep.federated.neural_task import Network as Named
    from privrep.multimodal.training import ClipSettings, Mechanism, Sampler
    from privrep.neural.rounds import TrainingSettings
    from privrep.schema.clip import PairTraining

    assert get_args(Network) == (*get_args(Named), "none")
    assert set(Training.model_fields) <= {each.name for each in fields(TrainingSettings)}
    trained = {name: choices_of(each.annotation) for name, each in PairTraining.model_fields.items()}
    assert (trained["mechanism"], trained["sampling"]) == (get_args(Mechanism), get_args(Sampler))
    own = {"temperature", "learn_temperature", "cosine", "centre"}
    assert set(trained) - own <= {each.name for each in fields(ClipSettings)}


def test_the_schema_is_light_and_the_program_does_without_it() -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'pyarrow', 'flwr'} & set(sys.modules)"
    code = (
        "import sys, privrep, privrep.cli; assert not any(name.startswith('pydantic') for name in sys.modules); "
        f"import privrep.schema.template; print(sorted({heavy}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""`Centaur` from end to end on made-up images: what it learns, what it spends, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from privrep import Centaur  # noqa: E402
from privrep.data.table import UserTable  # noqa: E402
from privrep.errors import InputError, NothingLearned, UnknownLabels  # noqa: E402
from privrep.neural.features import Dct, Frozen  # noqa: E402
from privrep.neural.rounds import TrainingSettings  # noqa: E402
from privrep.privacy.events import Gaussian, Sampled  # noqa: E402

SIDE, ROWS = 8, 16
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def made_up(users: int, classes: int = 4, held: int = 3, seed: int = 0) -> Rows:
    """Images of waves in noise, of as many kinds as there are classes; users see some of them."""
    rng = np.random.default_rng(seed)
    across = np.linspace(0, np.pi, SIDE)
    kinds = [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0)][:classes]
    waves = np.array([np.outer(np.cos(a * across), np.cos(b * across)).ravel() for a, b in kinds])
    own = np.stack([rng.permutation(classes)[:held] for _ in range(users)])
    y = own[np.arange(users)[:, None], rng.integers(0, held, (users, ROWS))].ravel()
    X = waves[y] + rng.normal(size=(users * ROWS, SIDE * SIDE))
    return X.astype(np.float32), y, np.repeat(np.arange(users), ROWS)


def halves(rows: Rows, first: int = 6) -> tuple[Rows, Rows]:
    """Some rows of every user, and the others."""
    chosen = np.arange(len(rows[1])) % ROWS < first
    return tuple(part[chosen] for part in rows), tuple(part[~chosen] for part in rows)  # type: ignore[return-value]


def small(**options: Any) -> Centaur:
    return Centaur(**{"classes": 4, "epsilon": 2.0, "delta": 1e-5, "random_state": 0, "rows": 6, **options})


def network() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(SIDE * SIDE, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh()), nn.Linear(3, 4)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return made_up(60)


def test_the_default_beats_training_alone_where_it_should() -> None:
    train, test = halves(made_up(400))
    together, alone = small().fit(*train), small(share="nothing").fit(*train)
    assert together.score(*test) > alone.score(*test) + 0.05
    assert together.privacy_.epsilon == pytest.approx(2.0, rel=1e-3)


def test_a_hopeless_budget_is_training_alone_and_spends_nothing() -> None:
    train, test = halves(made_up(30))
    with pytest.warns(NothingLearned, match="nothing"):
        hopeless = small(epsilon=0.1).fit(*train)
    with pytest.warns(NothingLearned):
        alone = small(epsilon=0.1, share="nothing").fit(*train)
    np.testing.assert_array_equal(hopeless.predict_proba(test[0], test[2]), alone.predict_proba(test[0], test[2]))
    assert hopeless.privacy_.epsilon == 0
    assert hopeless.privacy_.events == ()


def test_a_whole_network_is_charged_to_one_ledger(rows: Rows) -> None:
    model = small(representation="mlp", share="all", rounds=2).fit(*rows)
    assert model.plan_.parameters == SIDE * SIDE * 256 + 256 + 256 * 128 + 128 + 128 * 16 + 16
    assert 1.9 < model.privacy_.epsilon <= 2.0
    pages = {name.split("/")[0] for name, _ in model.privacy_.events}
    assert {"centre", "round-1", "round-2", "heads"} <= pages
    assert {page.name for page in model.billboard_} == pages | {"network"}
    assert model.predict_proba(rows[0], rows[2]).sum(axis=1) == pytest.approx(1, abs=1e-6)


def test_a_network_of_ones_own(rows: Rows) -> None:
    representation, head = network()
    before = [p.detach().clone() for p in representation.parameters()]
    model = small(representation=representation, head=head, classes=None, share="all", rounds=2).fit(*rows)
    assert model.n_classes == 4
    assert all(torch.equal(a, b) for a, b in zip(before, representation.parameters(), strict=True))
    assert not np.array_equal(model.learned_.weights, np.concatenate([b.numpy().ravel() for b in before]))


@pytest.mark.parametrize("share", ["adapters", "linear", "nothing"])
def test_a_pretrained_module_may_stay_frozen(rows: Rows, share: str) -> None:
    representation, _ = network()
    model = small(representation=representation, pretrained=True, share=share, rounds=2)
    if share == "nothing":
        with pytest.warns(NothingLearned):
            model.fit(*rows)
    else:
        model.fit(*rows)
    assert isinstance(model.map_, Frozen) == (share != "adapters")
    assert model.score(*rows) > 0.25


def test_a_sampled_round_is_charged_less_than_one_of_everybody(rows: Rows) -> None:
    settings = TrainingSettings(rate=0.2, clip=0.2, step_size=1.0)
    sampled = small(share="linear", rounds=4, settings=settings).fit(*rows)
    whole = small(share="linear", rounds=4, settings=TrainingSettings(clip=0.2, step_size=1.0)).fit(*rows)
    events, others = dict(sampled.privacy_.events), dict(whole.privacy_.events)
    for t in range(1, 5):
        event, other = events[f"round-{t}/update"], others[f"round-{t}/update"]
        assert isinstance(event, Sampled)
        assert isinstance(other, Gaussian)
        assert event.rate == 0.2
        assert event.noise_multiplier < 0.7 * other.noise_multiplier  # less noise for the same budget
    assert 1.9 < sampled.privacy_.epsilon <= 2.0


def test_who_was_not_there_gets_a_head_for_nothing(rows: Rows) -> None:
    model = small(share="linear", rounds=2).fit(*rows)
    spent, pages = model.privacy_.epsilon, len(model.billboard_)
    X, y, groups = made_up(61)
    mine = groups == 60
    head = model.personalize(X[mine][:8], y[mine][:8])
    assert head.predict(X[mine]).shape == (ROWS,)
    np.testing.assert_allclose(head.predict_proba(X[mine]).sum(axis=1), 1)
    assert (model.ledger_.epsilon, len(model.billboard_)) == (spent, pages)


def test_the_head_of_a_user_is_the_same_however_it_was_made(rows: Rows) -> None:
    """The head made for a user in a fit, and the one made for the same rows afterwards."""
    model = small(share="linear", rounds=2).fit(*rows)
    X, y, groups = rows
    mine = groups == 7
    np.testing.assert_allclose(
        model.personalize(X[mine], y[mine]).predict_proba(X[mine]),
        model.predict_proba(X[mine], groups[mine]),
        atol=1e-5,
    )


def test_classes_have_the_names_they_were_given(rows: Rows) -> None:
    names = np.array(["ant", "bee", "cat", "dog"])
    X, y, groups = rows
    named = small(classes=list(names), share="linear", rounds=2).fit(X, names[y], groups)
    numbered = small(share="linear", rounds=2).fit(X, y, groups)
    np.testing.assert_array_equal(named.predict(X, groups), names[numbered.predict(X, groups)])


def test_a_label_that_is_no_class_is_a_row_that_is_not_there(rows: Rows) -> None:
    X, y, groups = rows
    strange = y.astype(float)
    strange[::5] = np.nan
    kept = ~np.isnan(strange)
    options: dict[str, Any] = {"share": "linear", "rounds": 2}
    with pytest.warns(UnknownLabels, match=r"^192 of 960 rows .* left out \(not private: for your screen\)$") as said:
        with_nan = small(**options).fit(X, strange, groups)
    assert said[0].filename == __file__
    with pytest.warns(UnknownLabels, match="192 of 960"):
        with_nine = small(**options, classes=[0, 1, 2, 3]).fit(X, np.where(kept, y, 9), groups)
    with pytest.warns(UnknownLabels, match="192 of 960"):
        table = small(**options).fit(UserTable.from_rows(X, np.where(kept, y, -1.0), groups))
    without = small(**options).fit(X[kept], y[kept], groups[kept])
    for other in (with_nan, with_nine, table):
        np.testing.assert_array_equal(other.learned_.weights, without.learned_.weights)
        np.testing.assert_array_equal(other.predict_proba(X, groups), without.predict_proba(X, groups))


def test_a_user_all_of_whose_labels_are_none_stays_a_user_without_rows(rows: Rows) -> None:
    X, y, groups = rows
    labels = np.where(groups == 7, -1, y)
    with pytest.warns(UnknownLabels, match="16 of 960"):
        model = small(share="linear", rounds=2).fit(X, labels, groups)
    assert model.described_["user_count"] == 60
    assert np.isfinite(model.predict_proba(X[groups == 7], groups[groups == 7])).all()


@pytest.mark.parametrize(
    ("classes", "change", "sentence"),
    [
        (4, lambda y: y + 1, r"labels 0 to 3, and some are larger; write classes=\[1, 2, 3, 4\]"),
        (4, lambda y: (y + 1).astype(str), r"write classes=\[1, 2, 3, 4\]"),
        (4, lambda y: (y + 1).astype(float), r"write classes=\[1, 2, 3, 4\]"),
        (4, lambda y: [10**400, *y[1:].tolist()], "some are larger"),
        (4, lambda y: np.full(len(y), np.nan), r"no label is one of the classes, .* such as classes=\[1, 2, 3, 4\]"),
        (4, lambda y: np.full(len(y), np.inf), "no label is one of the classes"),
        (4, lambda y: -1 - y, "no label is one of the classes"),
        (11, lambda y: y - 99, r"such as classes=list\(range\(1, 12\)\)"),
        (
            ["a", "b", "c", "d"],
            lambda y: y,
            r"declared classes \('a', 'b', 'c', 'd'\); list them as labels are written",
        ),
        (["1", "2"], lambda y: y + 1, "no row has one of the declared classes"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused_before_anything_is_spent(
    rows: Rows, tmp_path: Any, classes: Any, change: Any, sentence: str
) -> None:
    X, y, groups = rows
    model = small(classes=classes, share="linear", rounds=1, run_folder=tmp_path / "run")
    with pytest.raises(InputError, match=sentence) as error:
        model.fit(X, change(y), groups)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    assert not hasattr(model, "ledger_")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda y: y + 1, "places among the 4 classes, 0 to 3, and some are larger; number them from 0"),
        (lambda y: -1 - y, "no row has a class number, 0 to 3"),
        (lambda y: y + 0.5, "no row has a class number, 0 to 3"),
        (lambda y: np.full(len(y), np.inf), "no row has a class number, 0 to 3"),
    ],
)
@pytest.mark.parametrize("classes", [4, ["a", "b", "c", "d"]])
def test_class_numbers_of_a_table_are_refused_as_labels_are(
    rows: Rows, tmp_path: Any, classes: Any, change: Any, sentence: str
) -> None:
    X, y, groups = rows
    table = UserTable.from_rows(X, change(y).astype(float), groups)
    with pytest.raises(InputError, match=sentence):
        small(classes=classes, run_folder=tmp_path / "run").fit(table)
    assert not (tmp_path / "run").exists()


def test_labels_are_not_quoted_by_the_sentence_that_refuses_them(rows: Rows) -> None:
    X, y, groups = rows
    said = set()
    for label in (4, 5, 8675309):
        with pytest.raises(InputError) as error:
            small().fit(X, np.where(groups == 3, label, y), groups)
        said.add(str(error.value))
    assert len(said) == 1


def test_classes_that_are_listed_leave_other_numbers_out(rows: Rows) -> None:
    X, y, groups = rows
    with pytest.warns(UnknownLabels, match="rows have a label that is none of the classes"):
        model = small(classes=[1, 2, 3], share="linear", rounds=1).fit(X, y, groups)
    assert set(model.predict(X, groups).tolist()) <= {1, 2, 3}


def test_progress_tells_pages_and_a_loss_that_is_written_nowhere(rows: Rows, tmp_path: Any) -> None:
    pages: list[tuple[str, float]] = []
    losses: list[tuple[str, float]] = []
    options: dict[str, Any] = {"share": "linear", "rounds": 3, "epsilon": 100.0}  # so that rounds help
    plain = small(**options).fit(*rows)
    watched = small(
        **options,
        run_folder=tmp_path / "run",
        on_page=lambda page, epsilon: pages.append((page, epsilon)),
        on_loss=lambda page, loss: losses.append((page, loss)),
    ).fit(*rows)
    assert [page for page, _ in losses] == ["round-1", "round-2", "round-3"]
    assert losses[0][1] < np.log(4)  # heads know how often their users have each class
    assert losses[0][1] > losses[-1][1] > 0
    assert [page for page, _ in pages][-1] == "heads"
    assert all(a[1] < b[1] for a, b in pairwise(pages))
    np.testing.assert_array_equal(plain.learned_.weights, watched.learned_.weights)
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert not any(f"{loss:.4g}".encode() in written for _, loss in losses)


def test_planning_costs_nothing_and_says_why() -> None:
    plan = small(image=(28, 28, 1)).planned(2000, 784)
    assert plan.share == "linear"
    assert "directions of them for each class" in plan.words


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"classes": None}, "must be public"),
        ({"classes": 1}, "at least 2 classes"),
        ({"classes": ["a", "a"]}, "twice"),
        ({"classes": "ab"}, "whole number or a list"),
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": "one"}, "epsilon must be a number"),
        ({"delta": 0}, "delta must be above 0"),
        ({"delta": 1.5}, "delta"),
        ({"share": "some"}, "share must be one of auto, all"),
        ({"share": "all"}, "needs a representation"),
        ({"share": "adapters"}, "pretrained"),
        ({"rows": 0}, "rows must be a whole number"),
        ({"rounds": 2.5}, "rounds must be a whole number"),
        ({"random_state": -1}, "random_state"),
        ({"settings": {"clip": 1}}, "settings must be"),
        ({"image": (28, 28, 1)}, "not an image of"),
        ({"image": (8, 8)}, "height, width, channels"),
        ({"features": "edges"}, "features must be a map"),
        ({"features": Dct(9, 9)}, "takes rows of 81 numbers"),
        ({"representation": "vgg"}, "mlp, lenet"),
        ({"representation": "lenet"}, "square images"),
        ({"representation": "lenet", "image": (8, 8, 1)}, "too small"),
        ({"representation": 3}, "torch.nn.Module"),
        ({"representation": nn.Linear(9, 3)}, "representation cannot take rows of 64 numbers"),
        ({"representation": nn.Linear(64, 3), "head": nn.Linear(3, 7)}, "7 scores and there are 4 classes"),
        ({"representation": nn.Linear(64, 3), "head": nn.Linear(4, 4)}, "head cannot take"),
        ({"head": nn.Linear(3, 4)}, "goes with a representation"),
        ({"pretrained": True}, "pretrained speaks of"),
        ({"representation": normalised()}, r"layer '1' is a BatchNorm1d: .* Use nn.GroupNorm or nn.LayerNorm"),
        ({"representation": nn.Linear(64, 3), "head": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))}, "GroupNorm"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(
    rows: Rows, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        small(**options).fit(*rows)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda X, y, g: (X, None, g), r"fit\(X, y, groups\)"),
        (lambda X, y, g: (X, y, None), "needs groups"),
        (lambda X, y, g: (X, y, [None, *g[1:]]), "no user in row 0"),
        (lambda X, y, g: (X, y, np.where(g == 3, np.nan, g)), "no user in row 48"),
        (lambda X, y, g: (X, y, np.zeros(len(y))), "at least two"),
        (lambda X, y, g: (X, y.astype(str), np.asarray(g)), None),
        (lambda X, y, g: (X, y[:-1], g), "one target"),
        (lambda X, y, g: (X, y[:, None], g), "one label for each row"),
        (lambda X, y, g: (X[:, 0], y, g), "one row of numbers"),
        (lambda X, y, g: (X.reshape(-1, 8, 8), y, g), r"X.reshape\(len\(X\), -1\)"),
        (lambda X, y, g: (np.full(X.shape, "a"), y, g), "numbers alone"),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_one_sentence(rows: Rows, change: Any, sentence: str | None) -> None:
    model = small(share="linear", rounds=1)
    if sentence is None:
        model.fit(*change(*rows))  # numbers written as text are numbers
        return
    with pytest.raises(InputError, match=sentence):
        model.fit(*change(*rows))


def test_rows_and_users_the_model_does_not_know_are_refused(rows: Rows) -> None:
    X, _, groups = rows
    model = small(share="linear", rounds=1).fit(*rows)
    with pytest.raises(InputError, match="rows of 64 numbers"):
        model.predict(X[:, :9], groups)
    with pytest.raises(InputError, match="user 99 was not in the fit"):
        model.predict(X[:1], [99])
    with pytest.raises(InputError, match="user of each"):
        model.predict(X, groups[:-1])


def test_torch_is_loaded_only_by_those_who_ask_for_it() -> None:
    code = "import sys, privrep, privrep.cli; assert 'torch' not in sys.modules; from privrep import *"
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)})
    assert ended.returncode == 0

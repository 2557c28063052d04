"""Local steps that travelled as data do what the steps did, to the last bit, and no message makes anything else."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse

import privrep.heads
import privrep.linear.methods
import privrep.local
from privrep.data.synthetic import make_class_population, make_population
from privrep.data.synthetic_margin import make_margin_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.federated.wire import step_codec as steps_module
from privrep.federated.wire import travelling
from privrep.federated.wire.step_codec import WIDEST, decode, encode
from privrep.federated.wire.travelling import HELD, INNER_STEPS, PART, STEPS
from privrep.linear.class_steps import ClassGradient, Encoded
from privrep.linear.methods.centaur import centaur_linear, paper_centaur
from privrep.linear.methods.factorization import private_factorization
from privrep.linear.methods.fedavg import ModelUpdate, fedavg, paper_fedavg
from privrep.linear.methods.lipschitz_selection import lipschitz_selection
from privrep.linear.methods.margin_selection import margin_selection
from privrep.linear.methods.priv_altmin import QuarterEquations, paper_altmin, priv_altmin
from privrep.linear.methods.private_fedrep import paper_fedrep, private_fedrep
from privrep.linear.nets import Net, RandomNet, Zooming
from privrep.linear.panel_steps import Residual
from privrep.linear.rating_steps import RatingPairs
from privrep.linear.starts import INITIALISERS
from privrep.linear.steps import LeaveOneOutGradient, PairMoments, PowerStep
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.local.representation import Ratings
from privrep.local.transform import FeatureTransform, Projection
from privrep.privacy.bounds import Bound
from privrep.privacy.protocol import EVERYONE, Facts, Step
from privrep.privacy.run import Run
from privrep.privacy.sampling import Poisson
from privrep.typing import Array, Axes, Matrix, Vector
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.projected import ProjectedStep, ProjectedUsers
from runs import run_on


def travelled(step: Any, features: int | None = None, targets: int = 1) -> Any:
    """The step after a journey: its text as text, its arrays as bytes in read-only memory of any alignment."""
    text, arrays = encode(step)
    sent = {}
    for name, array in arrays.items():
        assert array.flags.c_contiguous
        memory = b"x" + array.tobytes()
        sent[name] = np.frombuffer(memory, array.dtype, array.size, 1).reshape(array.shape)
    return decode(text, sent, features, targets)


def same_arrays(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[name].dtype and a.shape == other[name].shape and a.tobytes() == other[name].tobytes()
        for name, a in one.items()
    )


@dataclass
class Users:
    """An engine that answers by steps that travelled, and keeps what the steps themselves would have answered."""

    users: Any
    seen: dict[str, Any] = field(default_factory=dict)
    asked: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def facts(self) -> Facts:
        return self.users.facts

    def sums(self, step: Any, bounds: Any, among: Any = EVERYONE) -> Any:
        self.asked += 1
        self._keep(step)
        text, arrays = encode(step)
        again, others = encode(step)
        back = travelled(step, self.facts.features, self.facts.targets)
        sums = self.users.sums(step, bounds, among)
        found = self.users.sums(back, bounds, among)
        same = all(sums[key].exact_numbers.tobytes() == found[key].exact_numbers.tobytes() for key in bounds)
        third, further = encode(back)
        if not (same and text == again == third and same_arrays(arrays, others) and same_arrays(arrays, further)):
            self.wrong.append(type(step).__name__)
        return found

    def _keep(self, value: Any) -> None:
        """Every dataclass that the step is made of."""
        if isinstance(value, tuple):
            for each in value:
                self._keep(each)
        if dataclasses.is_dataclass(value):
            self.seen[f"{type(value).__module__}:{type(value).__qualname__}"] = value
            for each in dataclasses.fields(value):
                self._keep(getattr(value, each.name))


def run_of(table: Any, epsilon: float = 8.0, delta: float = 1e-6) -> Run:
    users = Users(table if isinstance(table, ProjectedUsers) else InMemoryUsers(table, Performance(1)))
    return run_on(users, epsilon, delta)


def numbers(
    users: int = 300, features: int = 6, targets: int = 1, kind: str = "dense", condition: float = 1.0
) -> UserTable:
    rng = np.random.default_rng(5)
    table = make_population(rng, users, features, 2, 10, 0.1, head_condition=condition).sample(rng, np.float32)
    y = table.y if targets == 1 else np.stack([table.y, *(table.y * rng.normal() for _ in range(targets - 1))], axis=1)
    X = sparse.csr_matrix(np.where(rng.random(table.X.shape) < 0.5, table.X, 0)) if kind == "sparse" else table.X
    return UserTable.from_rows(X, y, np.repeat(np.arange(users), 10))


def panel(users: int = 400, targets: int = 1, kind: str = "dense") -> UserTable:
    """Users with levels far from zero, common slopes, and some with few rows."""
    table, rng = numbers(users, targets=targets, kind=kind), np.random.default_rng(10)
    user = np.repeat(np.arange(users), 10)
    kept = np.arange(10 * users) % 10 < (2 + user % 9)
    slopes = np.linspace(1, 2, 6).astype(np.float32)
    moved = 100 + rng.normal(size=users)[user] + table.X @ slopes
    y = table.y + (moved if targets == 1 else moved[:, None])
    return UserTable.from_rows(
        sparse.csr_matrix(table.X)[kept] if kind == "sparse" else table.X[kept], y[kept], user[kept]
    )


def labels(classes: int, kind: str = "dense") -> UserTable:
    rng = np.random.default_rng(6)
    table = make_class_population(rng, 300, 6, 2, 12, classes).sample(rng)
    X = sparse.csr_matrix(np.where(rng.random(table.X.shape) < 0.5, table.X, 0)) if kind == "sparse" else table.X
    return replace(table, X=UserTable.from_rows(X, table.y, np.repeat(np.arange(300), 12)).X)


def ratings() -> UserTable:
    rng = np.random.default_rng(7)
    items = np.concatenate([rng.permutation(12)[:6] for _ in range(200)])
    rows = sparse.csr_matrix((np.ones(len(items), np.float32), (np.arange(len(items)), items)))
    taste = np.repeat(rng.normal(size=200), 6) * np.where(items % 2, 1.0, -1.0)
    return UserTable.from_rows(rows, taste + 0.1 * rng.normal(size=len(items)), np.repeat(np.arange(200), 6))


def margins() -> UserTable:
    rng = np.random.default_rng(8)
    return make_margin_population(rng, 50, 12, 2, 6, margin=0.3).sample(rng)


QUICK = Zooming(candidates=64, rounds=2)
FITS: dict[str, tuple[Callable[[], Run], Callable[[Run], Any]]] = {
    "fedrep": (lambda: run_of(numbers()), lambda run: private_fedrep(run, 2)),
    "fedrep, rank unknown": (lambda: run_of(numbers(1000), 100.0), lambda run: private_fedrep(run, None)),
    "fedrep, weak": (lambda: run_of(numbers(1000, 20, condition=9.0), 8.0), lambda run: private_fedrep(run, 2)),
    "classes, rank unknown": (
        lambda: run_of(labels(2), 100.0),
        lambda run: private_fedrep(run, None, loss=Loss("log", 2)),
    ),
    "fedrep, no intercept": (lambda: run_of(numbers()), lambda run: private_fedrep(run, 3, intercept=False)),
    "fedrep, targets": (lambda: run_of(numbers(targets=3)), lambda run: private_fedrep(run, 2)),
    "fedrep, sparse": (lambda: run_of(numbers(kind="sparse")), lambda run: private_fedrep(run, 2)),
    "fedrep, rank 0": (lambda: run_of(panel()), lambda run: private_fedrep(run, 0)),
    "fedrep, levels": (lambda: run_of(panel(), 100.0), lambda run: private_fedrep(run, None)),
    "fedrep, levels, targets": (lambda: run_of(panel(targets=3), 100.0), lambda run: private_fedrep(run, None)),
    "fedrep, levels, sparse": (lambda: run_of(panel(kind="sparse"), 100.0), lambda run: private_fedrep(run, None)),
    "altmin, levels": (lambda: run_of(panel(), 100.0), lambda run: priv_altmin(run, None)),
    "centaur, levels, targets": (lambda: run_of(panel(targets=2), 100.0), lambda run: centaur_linear(run, None)),
    "altmin": (lambda: run_of(numbers()), lambda run: priv_altmin(run, 2)),
    "altmin, targets": (lambda: run_of(numbers(targets=2)), lambda run: priv_altmin(run, 2)),
    "centaur": (lambda: run_of(numbers()), lambda run: centaur_linear(run, 2)),
    "centaur, targets": (lambda: run_of(numbers(targets=2)), lambda run: centaur_linear(run, 2)),
    "centaur, sparse": (lambda: run_of(numbers(kind="sparse")), lambda run: centaur_linear(run, 2)),
    "paper fedrep": (lambda: run_of(numbers()), lambda run: paper_fedrep(run, 2)),
    "paper altmin": (lambda: run_of(numbers()), lambda run: paper_altmin(run, 2)),
    "fedavg": (lambda: run_of(numbers()), lambda run: fedavg(run)),
    "paper fedavg": (lambda: run_of(numbers()), lambda run: paper_fedavg(run)),
    "paper centaur": (lambda: run_of(numbers()), lambda run: paper_centaur(run, 2)),
    "classes": (lambda: run_of(labels(2)), lambda run: private_fedrep(run, 2, loss=Loss("log", 2))),
    "classes, few users": (
        lambda: run_of(labels(2), 0.1),
        lambda run: private_fedrep(run, 2, loss=Loss("log", 2)),
    ),
    "5 classes": (lambda: run_of(labels(5)), lambda run: private_fedrep(run, 2, loss=Loss("log", 5))),
    "hinge": (lambda: run_of(labels(2)), lambda run: private_fedrep(run, 2, loss=Loss("hinge", 2))),
    "hinge, 3": (lambda: run_of(labels(3)), lambda run: private_fedrep(run, 2, loss=Loss("hinge", 3))),
    "classes, sparse": (lambda: run_of(labels(3, "sparse")), lambda run: private_fedrep(run, 2, loss=Loss("log", 3))),
    "classes, centaur": (lambda: run_of(labels(3)), lambda run: centaur_linear(run, 2, loss=Loss("log", 3))),
    "ratings": (lambda: run_of(ratings()), lambda run: private_factorization(run, 2)),
    "ratings, with pairs": (lambda: run_of(ratings(), 1000.0), lambda run: private_factorization(run, 2)),
    "margin": (lambda: run_of(margins(), delta=0.0), lambda run: margin_selection(run, 2, margin=0.3, zooming=QUICK)),
    "margin, no projection": (
        lambda: run_of(margins(), delta=0.0),
        lambda run: margin_selection(run, 1, margin=0.3, projected=12, zooming=QUICK),
    ),
    "lipschitz": (
        lambda: run_of(margins(), delta=0.0),
        lambda run: lipschitz_selection(run, 2, loss="absolute", projected=5, zooming=QUICK),
    ),
}
FITS |= {
    f"fedrep, {name}": (lambda: run_of(numbers(100), 4.0), partial(private_fedrep, rank=2, initialiser=start))
    for name, start in INITIALISERS.items()
}


def pictures(users: int, columns: int, classes: int = 3) -> UserTable:
    rng = np.random.default_rng(9)
    X = rng.normal(size=(users * 4, columns)).astype(np.float32)
    return UserTable.from_rows(X / 3, rng.integers(0, classes, users * 4), np.repeat(np.arange(users), 4))


def network(share: str, run: Run, raw: int = 0, given: Any = None, rounds: int = 2, **options: Any) -> None:
    from privrep.neural.layers import Shape
    from privrep.neural.plan import SharingPlan
    from privrep.neural.training import PLAIN, WHOLE, learn

    ordered, features, otherwise = options.pop("ordered", False), options.pop("features", 0), None
    if options.pop("look", False):
        otherwise = SharingPlan("directions", 1, 1, 1.0, features=run.users.facts.features, rank=3)
    plan = SharingPlan(share, 100, rounds, 1.0, features, 3, otherwise=otherwise)  # type: ignore[arg-type]
    settings = replace(PLAIN if share == "linear" else WHOLE, **options) if options else None
    learn(run, plan, given, Shape(3, 5, raw, ordered), settings)


def halfway(run: Run) -> None:
    from privrep.neural.layers import Shape, linear_split
    from privrep.neural.mixed import BetterAlone, are_mixed
    from privrep.neural.plan import SharingPlan
    from privrep.neural.training import SharedPart, losses_of_nobody

    features = run.users.facts.features
    both, plan = linear_split(np.zeros(features), Shape(3, 5)), SharingPlan("linear", 3 * features, 4, 1.0, features)
    part = SharedPart(plan, both, both.representation.weights(), np.zeros(features), 1.0, 0, losses_of_nobody())
    are_mixed(run, BetterAlone(part, 5), 0.01, 4.0)


def whole(run: Run, **options: Any) -> None:
    from privrep.neural.models import mlp

    network("all", run, 8, mlp(8, (6, 5), 3), **options)


def lenet_rounds(run: Run, **options: Any) -> None:
    from privrep.neural.models import lenet

    network("all", run, 256, lenet(1, 16, (5,), 3), 1, **options)


def adapters(run: Run, kind: str = "mlp", **options: Any) -> None:
    from privrep.neural.models import add_adapters, lenet, mlp

    both, raw = (mlp(8, (6, 5), 3), 8) if kind == "mlp" else (lenet(1, 16, (5,), 3), 256)
    network("adapters", run, raw, (add_adapters(both[0], 2), both[1]), 1, **options)


def own_layers(run: Run) -> None:
    from torch import nn

    representation = nn.Sequential(
        nn.Unflatten(1, (2, 8, 8)), nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.LeakyReLU(0.1),
        nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(16),
        nn.Linear(16, 6), nn.GELU(), nn.Identity(), nn.Linear(6, 5), nn.Sigmoid(),
    )  # fmt: skip
    network("all", run, 128, (representation, nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))), 1)


NETWORKS: dict[str, tuple[int, Callable[[Run], None]]] = {
    "linear": (10, lambda run: network("linear", run)),
    "linear, a bound that stays": (10, lambda run: network("linear", run, quantile=None)),
    "linear, after a look": (10, lambda run: network("linear", run, look=True)),
    "linear, halfway": (10, lambda run: halfway(run)),
    "directions": (10, lambda run: network("directions", run)),
    "all": (14, whole),
    "all, several epochs": (14, lambda run: whole(run, epochs=2, batch=2)),
    "all, a bound that stays": (14, lambda run: whole(run, quantile=None)),
    "all, lenet": (262, lenet_rounds),
    "all, lenet, several epochs": (262, lambda run: lenet_rounds(run, epochs=2)),
    "all, layers of one's own": (134, own_layers),
    "adapters": (14, adapters),
    "adapters, lenet": (262, lambda run: adapters(run, "lenet")),
    "adapters, several epochs": (14, lambda run: adapters(run, epochs=2)),
}


@cache
def asked(name: str) -> Users:
    """The users of a fit that is over."""
    if name in FITS:
        make, fit = FITS[name]
        run = make()
    else:
        pytest.importorskip("torch")
        columns, fit = NETWORKS[name]
        run = run_of(pictures(30 if columns < 100 else 8, columns))
    fit(run)
    assert isinstance(run.users, Users)
    return run.users


@pytest.mark.parametrize("name", [*FITS, *NETWORKS])
def test_steps_that_travelled_give_the_same_clipped_sums(name: str) -> None:
    users = asked(name)
    assert users.asked > 0
    assert not users.wrong


def test_every_class_of_the_list_was_sent_by_a_fit() -> None:
    pytest.importorskip("torch")
    seen = {name: value for fit in (*FITS, *NETWORKS) for name, value in asked(fit).seen.items()}
    assert set(seen) == {*STEPS, *HELD, PART}


def test_every_step_of_users_is_on_the_list() -> None:
    exceptions = {"privrep.local.transform:Projection"}  # makes rows of rows; `ProjectedStep` holds one
    packages = [privrep.local, privrep.heads, privrep.linear, privrep.linear.methods]
    modules = [each.name for one in packages for each in pkgutil.iter_modules(one.__path__, f"{one.__name__}.")]
    found = set()
    for module in modules:
        for value in vars(importlib.import_module(module)).values():
            steps = isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module
            if steps and "references" not in module and any("__call__" in vars(kind) for kind in value.__mro__):
                found.add(f"{value.__module__}:{value.__qualname__}")
    assert len(found) > 15
    assert found - exceptions <= set(STEPS)
    assert exceptions <= found & set(HELD)


def test_every_array_of_the_list_declares_its_number_of_axes() -> None:
    pytest.importorskip("torch")
    listed = [*STEPS, *HELD]
    assert {
        name: lacking for name in listed if (lacking := travelling.find_undeclared(travelling.class_of(name)))
    } == {}
    arrays = [
        (name, each)
        for name in listed
        for each, declared in travelling.fields_of(name).items()
        if any(travelling.fits(np.zeros((1,) * axes, kind), declared, name) for axes in (1, 2) for kind in "f?i")
    ]
    assert len(arrays) == 77


@dataclass(frozen=True)
class Undeclared:
    """A step whose arrays do not all say how many axes they have."""

    known: Matrix
    mask: Annotated[NDArray[np.bool_], Axes(1)]
    perhaps: Vector | None
    several: tuple[Vector, ...]
    bare: Array
    bare_perhaps: Array | None
    bare_several: tuple[Array, ...]
    around: Annotated[Array | None, Axes(2)]
    twice: Annotated[Matrix, Axes(1)]
    otherwise: Annotated[Array, 2]
    any_array: np.ndarray
    number: float = 0.0


def test_a_class_with_an_array_of_unknown_axes_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ["bare", "bare_perhaps", "bare_several", "around", "twice", "otherwise", "any_array"]
    assert travelling.find_undeclared(Undeclared) == lacking
    name = f"{__name__}:Undeclared"
    monkeypatch.setattr(travelling, "HELD", (*HELD, name))
    with pytest.raises(TypeError, match=f"arrays of {', '.join(lacking)}.$"):
        travelling.fields_of(name)
    step = PairMoments(Undeclared(*[np.eye(2)] * 11), True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot travel"):
        encode(step)
    assert not any(
        travelling.fits(value, declared, name)
        for declared in (Array, Array | None, Annotated[Matrix, Axes(1)], Annotated[Array, 2])
        for value in (np.zeros(2), np.eye(2))
    )


def test_no_array_of_any_step_is_taken_with_an_axis_more_or_less() -> None:
    pytest.importorskip("torch")
    tried = 0
    for step in (*sent_steps(False), *sent_steps(True)):
        text, arrays = encode(step)
        assert type(decode(text, arrays)) is type(step)
        for name, array in arrays.items():
            for changed in (array[None], array[..., None], array.ravel() if array.ndim != 1 else array.sum()):
                with pytest.raises(InputError):
                    decode(text, arrays | {name: np.asarray(changed)})
                tried += 1
    assert tried > 100


def test_steps_for_several_targets_are_those_that_say_so_themselves() -> None:
    pytest.importorskip("torch")
    declared = {name for name in (*STEPS, *HELD) if travelling.takes_several_targets(name)}
    assert declared == {
        "privrep.linear.families:HeadErrors",
        "privrep.linear.families:HeadLosses",
        "privrep.linear.families:HeadVotes",
        "privrep.linear.methods.priv_altmin:NormalEquations",
        "privrep.linear.panel_steps:ColumnSizes",
        "privrep.linear.panel_steps:CommonGradient",
        "privrep.linear.panel_steps:LevelCells",
        "privrep.linear.panel_steps:PanelMoments",
        "privrep.linear.panel_steps:Residual",
        "privrep.linear.spreads:HeadSpreads",
        "privrep.linear.steps:FeatureSizes",
        "privrep.linear.steps:Frequencies",
        "privrep.linear.steps:LeaveOneOutGradient",
        "privrep.linear.steps:PairMoments",
        "privrep.linear.steps:PowerStep",
        "privrep.linear.steps:ResidualMoments",
        "privrep.linear.steps:SecondMoments",
    }
    inherits = travelling.class_of("privrep.linear.class_steps:ClassGradient")
    assert inherits.several_targets  # of its base, which does not count
    inner = PairMoments(FeatureTransform.plain(4), True)
    assert isinstance(decode(*encode(inner), 4, 3), PairMoments)
    for holder in (Encoded(inner, 3), ProjectedStep(inner, Projection(None, 1.0))):
        assert type(decode(*encode(holder), 4, 1)) is type(holder)
        with pytest.raises(InputError, match="one target"):
            decode(*encode(holder), 4, 3)
    residual = Residual(inner, PriorMean.zero(4, 3, True))  # it hands on as many targets as there are
    assert isinstance(decode(*encode(residual), 4, 3), Residual)
    with pytest.raises(InputError, match="one target"):
        decode(*encode(replace(residual, step=QuarterEquations(np.eye(4)[:, :2], 1.0, 1.0))), 4, 3)
    hidden = ProjectedStep(
        Encoded(ModelUpdate(np.zeros(4), FeatureTransform.plain(4), 0.1, True), 3), Projection(None, 1.0)
    )
    with pytest.raises(InputError, match="one target"):
        decode(*encode(hidden), 4, 1)


def test_what_stands_for_a_protocol_is_held_and_says_so_itself() -> None:
    pytest.importorskip("torch")
    from privrep.heads.gradient import HeadRule

    listed = {name: travelling.class_of(name) for name in (*STEPS, *HELD)}
    declared = {name: vars(kind)["fills"].__name__ for name, kind in listed.items() if "fills" in vars(kind)}
    assert declared == {
        "privrep.linear.nets:RandomNet": "Net",
        "privrep.neural.training:PriorHeads": "HeadRule",
        "privrep.heads.gradient:HeadFit": "HeadRule",
        "privrep.neural.training:SharedPart": "View",
    }
    holder, net = "privrep.linear.methods.margin_selection:MarginLosses", RandomNet("net", 4, 3, 1)
    assert travelling.fits(net, Net, holder)
    assert not travelling.fits(net, HeadRule, holder)

    class Own(RandomNet):
        fills: ClassVar[type] = Net

    for stranger in (Own("net", 4, 3, 1), type("Stranger", (), {"fills": Net})(), FeatureTransform.plain(3), None):
        assert not travelling.fits(stranger, Net, holder)


def test_every_step_that_holds_another_says_which() -> None:
    pytest.importorskip("torch")
    holding = {name for name in (*STEPS, *HELD) if Step in travelling.fields_of(name).values()}
    assert holding == set(INNER_STEPS)


# What a value is, it stays


def gradient(d: int = 50, k: int = 2) -> LeaveOneOutGradient:
    """Of Figure 1: 50 features, rank 2, correlated coordinates."""
    rng = np.random.default_rng(3)
    transform = FeatureTransform(rng.uniform(1, 2, d), rng.normal(size=(d, d)))
    return LeaveOneOutGradient(np.linalg.qr(rng.normal(size=(d, k)))[0], transform, 0.1, 1e-3, True)


def test_a_message_is_about_as_large_as_its_arrays() -> None:
    text, arrays = encode(gradient())
    assert sum(array.nbytes for array in arrays.values()) == 8 * (50 * 2 + 50 + 50 * 50)
    assert len(text.encode()) < 400


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -math.nan, 3, np.float64(0.1),
     np.float32(0.1), np.int64(-7)],
)  # fmt: skip
def test_numbers_survive_to_the_last_bit(value: Any) -> None:
    back = travelled(replace(gradient(), ridge=value)).ridge
    assert type(back) is type(value)
    assert np.asarray(back).tobytes() == np.asarray(value).tobytes()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("order", ["C", "F", "reversed", "cut", "every other"])
def test_arrays_survive_bit_for_bit_and_as_they_lie(dtype: str, order: str) -> None:
    values = np.arange(48).reshape(6, 8).astype(dtype)
    values[0, :4] = [np.nan, -np.inf, -0.0, 0.1]
    laid = {
        "C": values,
        "F": np.asfortranarray(values),
        "reversed": values[:, ::-1],
        "cut": values[:, :3],
        "every other": values[::2, ::2],
    }[order]
    back = travelled(replace(gradient(), U=laid)).U
    assert back.dtype == laid.dtype
    assert back.tobytes() == laid.tobytes()
    assert back.strides == laid.strides
    assert back.flags.writeable


@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "u4"])
def test_an_array_of_another_kind_than_declared_is_refused(dtype: str) -> None:
    text, arrays = encode(replace(gradient(), U=np.ones((4, 2), dtype)))
    with pytest.raises(InputError, match="field U"):
        decode(text, arrays)


@pytest.mark.parametrize("dtype", ["?", "f8"])
def test_a_list_of_places_is_not_taken_for_a_mask(dtype: str) -> None:
    """A mask would put other items into the slots than the ones that were meant."""
    ratings = Ratings(np.zeros(4), 1.0, 3.0, 1.0, 0.5)
    text, arrays = encode(RatingPairs(np.array([0, 3]), np.zeros((4, 1)), ratings))
    (places,) = [name for name, array in arrays.items() if array.dtype.kind == "i"]
    assert isinstance(decode(text, arrays), RatingPairs)
    with pytest.raises(InputError, match="field items"):
        decode(text, arrays | {places: arrays[places].astype(dtype)})


def test_classes_do_not_smuggle_several_targets_into_a_step_of_one() -> None:
    one = QuarterEquations(np.eye(4)[:, :2], 1.0, 1.0)
    with pytest.raises(InputError, match="one target"):
        decode(*encode(Encoded(one, 3)), 4, 1)
    assert isinstance(decode(*encode(Encoded(one, 2)), 4, 1), Encoded)


def test_arrays_that_lie_far_apart_or_on_each_other_are_sent_in_order() -> None:
    for odd in (np.zeros((2, 3_000_000))[:, :2], np.broadcast_to(np.arange(3.0), (4, 3))):
        back = travelled(replace(gradient(), U=odd)).U
        assert back.flags.c_contiguous
        np.testing.assert_array_equal(back, odd)


def test_containers_survive_within_their_kind() -> None:
    reader = steps_module._Reader({}, None)
    value = {"a": [1, (2.0, None, "\ud800 \x00 é"), {}], "": True}
    tree = json.loads(json.dumps(steps_module._write_value(value, {}, 0)))
    assert reader.read(tree, 0) == value
    assert type(reader.read(tree, 0)["a"][1]) is tuple


@pytest.mark.parametrize(
    "step",
    [
        lambda X, y: {},
        PairMoments(FeatureTransform.plain(3), intercept="no"),  # type: ignore[arg-type]
        PairMoments(FeatureTransform(np.array(["a"])), True),  # type: ignore[arg-type]
        PairMoments(FeatureTransform(np.zeros(3).astype(">f8")), True),
        PairMoments(object(), True),  # type: ignore[arg-type]
        PairMoments(FeatureTransform(np.ma.zeros(3)), True),
        FeatureTransform.plain(3),
        Projection(None, 1.0),
    ],
)
def test_what_cannot_be_sent_is_said(step: Any) -> None:
    with pytest.raises(InputError):
        decode(*encode(step))


def test_tables_need_no_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from privrep.federated.wire.step_codec import decode, encode\n"
        "from privrep.local.transform import FeatureTransform\n"
        "from privrep.linear.steps import PairMoments\n"
        "decode(*encode(PairMoments(FeatureTransform.plain(3), True)))\n"
        "for name in ('torch:zeros', 'flwr:app'):\n"
        "    try:\n"
        '        decode(\'{"class":"\' + name + \'","fields":{}}\', {})\n'
        "    except ValueError:\n"
        "        print('torch' in sys.modules or 'flwr' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# A sender that lies


def message(change: Callable[[dict[str, Any]], Any]) -> tuple[str, dict[str, np.ndarray]]:
    text, arrays = encode(gradient(6))
    tree = json.loads(text)
    changed = change(tree)
    return json.dumps(tree if changed is None else changed), arrays


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no step": lambda tree: tree["fields"]["transform"],
    "a number": lambda tree: 3,
    "a function": lambda tree: {"class": "os:system", "fields": {"command": "true"}},
    "another class of the module": lambda tree: tree.update({"class": "privrep.linear.steps:Slots"}),
    "a class of another module": lambda tree: tree.update({"class": "antigravity:LeaveOneOutGradient"}),
    "an attribute of a class": lambda tree: tree.update({"class": "privrep.local.transform:FeatureTransform.plain"}),
    "a field more": lambda tree: tree["fields"].update({"more": 1}),
    "a field less": lambda tree: tree["fields"].pop("ridge"),
    "a key more": lambda tree: tree.update({"more": 1}),
    "another array": lambda tree: tree["fields"]["U"].update({"array": "a9"}),
    "an array twice": lambda tree: tree["fields"]["U"].update({"array": "a1"}),
    "an array left over": lambda tree: tree["fields"]["transform"]["fields"].update({"whitening": None}),
    "no name of an array": lambda tree: tree["fields"]["U"].update({"array": [1]}),
    "an array of another shape": lambda tree: tree["fields"].update(
        {"U": tree["fields"]["transform"]["fields"]["scale"],
         "transform": {**tree["fields"]["transform"], "fields": {**tree["fields"]["transform"]["fields"],
                                                         "scale": tree["fields"]["U"]}}}
    ),
    "a text for a number": lambda tree: tree["fields"].update({"ridge": "1"}),
    "a number for a boolean": lambda tree: tree["fields"].update({"intercept": 1}),
    "a number for an array": lambda tree: tree["fields"].update({"U": 1.0}),
    "a step for a transform": lambda tree: tree["fields"].update({"transform": {"class": STEPS[2], "fields": {}}}),
    "an array for a number": lambda tree: tree["fields"].update({"ridge": {"scalar": "a0"}}),
    "strides that overlap": lambda tree: tree["fields"]["U"].update({"strides": [0, 1]}),
    "strides too far": lambda tree: tree["fields"]["U"].update({"strides": [1 << 40, 1]}),
    "strides without end": lambda tree: tree["fields"]["U"].update({"strides": [10**30, 1]}),
    "strides of another number": lambda tree: tree["fields"]["U"].update({"strides": [1]}),
    "strides of texts": lambda tree: tree["fields"]["U"].update({"strides": ["1", "2"]}),
    "bits of no float": lambda tree: tree["fields"].update({"ridge": {"bits": "zz" * 8}}),
    "a head that cannot be": lambda tree: {"class": "privrep.heads.gradient:HeadFit", "fields": {
        "steps": -1, "rate": 0.1, "momentum": 0.0, "ridge": 0.0}},
    "a part that is none": lambda tree: tree["fields"].update({"transform": {"part": {}}}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_one_sentence(lie: str) -> None:
    before = set(sys.modules)
    with pytest.raises(InputError) as told:
        decode(*message(LIES[lie]))
    assert "\n" not in str(told.value)
    assert not {"antigravity", "webbrowser"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[" * 100_000, '{"tuple":[' * 200 + "1" + "]}" * 200, "NaN", '{"dict":{},"dict":{}}', "9" * 5000,
     f'{{"class":"{STEPS[0]}","class":"{STEPS[0]}","fields":{{}}}}', None, 7],
)  # fmt: skip
def test_what_is_no_message_is_one_sentence(text: Any) -> None:
    with pytest.raises(InputError) as told:
        decode(text, {})
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    "arrays",
    [{}, {"a0": np.zeros(3)}, {"a0": [1.0, 2.0]}, {"a0": np.array([object()])}, {"a0": np.array(["text"])}, None,
     {f"a{i}": np.zeros(1) for i in range(2000)}],
)  # fmt: skip
def test_arrays_that_do_not_belong_are_one_sentence(arrays: Any) -> None:
    with pytest.raises(InputError):
        decode(encode(gradient(6))[0], arrays)


WORDS = [None, True, 0, -1, 1 << 70, 0.5, "a0", "", [], {}, {"array": "a0"}, {"scalar": "a1"}, {"tuple": []},
         {"bits": "7ff0000000000000"}, {"class": STEPS[2], "fields": {}}, {"part": {"layer": "ReLU"}}]  # fmt: skip


def spoilt(tree: Any, rng: np.random.Generator) -> Any:
    """The tree with something else in one place, or without it, or with something of its own there."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(tree)
    where, key = places[rng.integers(len(places))]
    other, theirs = places[rng.integers(len(places))]
    kind = rng.integers(5)
    if kind == 0:
        del where[key]
    elif kind == 1:
        where[key] = json.loads(json.dumps(other[theirs]))
    elif kind == 2 and isinstance(where, dict):
        where[str(rng.choice(["array", "class", "fields", "x", "strides", "layer"]))] = where.pop(key)
    else:
        where[key] = WORDS[rng.integers(len(WORDS))]
    return tree


def spoilt_arrays(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = dict(arrays)
    for name in list(arrays):
        kind = rng.integers(12)
        if kind == 0:
            del arrays[name]
        elif kind == 1:
            arrays[name] = arrays[name].ravel()
        elif kind == 2:
            arrays[name] = arrays[name][..., None]
        elif kind == 3:
            with np.errstate(invalid="ignore"):  # infinity is no integer
                arrays[name] = arrays[name].astype(rng.choice(["i8", "f2", "?", "c16", "S3"]))
        elif kind == 4:
            arrays[f"b{name}"] = arrays.pop(name)
    return arrays


def sent_steps(torch: bool) -> list[Any]:
    fits = {**FITS, **NETWORKS} if torch else FITS
    seen = {name: value for fit in fits for name, value in asked(fit).seen.items()}
    return [seen[name] for name in STEPS if name in seen and (".neural." in name) == torch]


def outcome_of(text: str, arrays: dict[str, np.ndarray]) -> str:
    """The name of the step that was made, or "told" if it was refused in one sentence."""
    try:
        back = decode(text, arrays)
    except InputError as error:
        return "told" if "\n" not in str(error) else str(error)
    return f"{type(back).__module__}:{type(back).__qualname__}"


@pytest.mark.parametrize("torch", [False, True])
def test_no_spoilt_message_is_anything_but_a_step_or_a_sentence(torch: bool) -> None:
    if torch:
        pytest.importorskip("torch")
    rng = np.random.default_rng(11)
    told = made = 0
    for step in sent_steps(torch):
        text, arrays = encode(step)
        for trial in range(60):
            tree = spoilt(json.loads(text), rng)
            changed = json.dumps(tree)
            if trial % 5 == 0:
                changed = changed[: rng.integers(len(changed))]
            before = set(sys.modules)
            outcome = outcome_of(changed, spoilt_arrays(arrays, rng) if trial % 2 else arrays)
            told, made = told + (outcome == "told"), made + (outcome in STEPS)
            assert outcome == "told" or outcome in STEPS
            assert all(name.startswith(("privrep", "torch", "numpy")) for name in set(sys.modules) - before)
    assert told > 5 * made > 0


# Modules


def one_step(representation: Any, head: Any, features: int, rank: int, classes: int = 3) -> Any:
    """A step of these modules, which are checked by nobody."""
    from privrep.heads.gradient import HeadFit
    from privrep.neural.gradient_step import GradientStep
    from privrep.nn.flat_module import FlatModule, Split

    split = Split(FlatModule(representation), FlatModule(head), features, rank, classes)
    return GradientStep(split, split.representation.weights(), split.head.weights(), HeadFit(), 0.1, 4)


def test_a_step_that_travelled_answers_about_a_sample() -> None:
    pytest.importorskip("torch")
    from privrep.neural.models import mlp

    users = InMemoryUsers(pictures(40, 8))
    step = one_step(*mlp(8, (6, 5), 3), 8, 5)
    sample, bounds = Poisson(0.5).sample(b"k" * 32), {"update": Bound(0.1, step.split.representation.size)}
    sums = users.sums(step, bounds, sample)["update"].exact_numbers
    assert np.abs(sums).max() > 0
    assert sums.tobytes() == users.sums(travelled(step), bounds, sample)["update"].exact_numbers.tobytes()


def test_modules_give_the_same_outputs_and_have_the_same_weights() -> None:
    torch = pytest.importorskip("torch")
    for name in ("all, lenet", "all, layers of one's own", "adapters, lenet", "linear"):
        on_standards = "privrep.neural.standard_step:StandardStep"
        step = asked(name).seen[on_standards if name == "linear" else "privrep.neural.rounds:MeasuredStep"].step
        back = travelled(step)
        rows = torch.sin(torch.arange(3.0 * step.split.features)).reshape(3, -1)
        for part, other in ((step.split.representation, back.split.representation), (step.split.head, back.split.head)):
            assert part.weights().tobytes() == other.weights().tobytes()
            assert list(part.shapes.items()) == list(other.shapes.items())  # what is trained, in its order
            assert str(part.module) == str(other.module)
            assert list(part.module.state_dict()) == list(other.module.state_dict())
            with torch.no_grad():
                given = part.module(rows)
                assert given.numpy().tobytes() == other.module(rows).numpy().tobytes()
            rows = given


def test_a_module_of_another_class_is_named() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Mine(nn.Linear):
        pass

    hooked, twice, more = nn.Linear(4, 2), nn.ReLU(), nn.Linear(4, 2)
    hooked.register_forward_hook(lambda *_: None)
    more.extra = nn.Parameter(torch.zeros(2))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    for module, words in (
        (nn.Sequential(nn.Linear(4, 2), nn.Softmax(1)), "Softmax"),
        (Mine(4, 2), "Mine"),
        (nn.BatchNorm1d(4), "BatchNorm1d"),
        (hooked, "hooks"),
        (nn.Sequential(twice, twice), "two places"),
        (nn.Sequential(first, second), "two places"),
        (more, "other weights"),
        (nn.LayerNorm(4, eps=math.inf), "finite"),
    ):
        with pytest.raises(InputError, match=words):
            encode(one_step(module, nn.Linear(2, 3), 4, 2))
    with pytest.raises(InputError, match="bfloat16"):
        encode(replace(one_step(nn.Linear(4, 2), nn.Linear(2, 3), 4, 2), split=half(nn)))


def half(nn: Any) -> Any:
    from privrep.nn.flat_module import FlatModule, Split

    return Split(FlatModule(nn.Linear(4, 2).bfloat16()), FlatModule(nn.Linear(2, 3)), 4, 2, 3)


def mixers() -> dict[str, Any]:
    """Modules of four numbers to four that lay rows over each other, or do not fit, by name."""
    from torch import nn

    from privrep.neural.models import Adapted, Images

    crossed = Adapted(nn.Identity(), nn.Identity(), nn.Unflatten(0, (-1, 1)))
    return {
        "flattened": nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 4))),
        "flattened, counted from behind": nn.Sequential(nn.Flatten(-2), nn.Unflatten(0, (-1, 4))),
        "two rows an image": nn.Sequential(Images(2, 2), nn.Flatten(), nn.Unflatten(1, (2, 4)), nn.Flatten(0, 1)),
        "rows as channels": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv2d(5, 5, 1), nn.Flatten()),
        "normalised over rows": nn.LayerNorm((5, 4)),
        "added to each other": nn.Sequential(crossed, nn.Flatten()),
        "added to another size": Adapted(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 1)),
        "another number of features": nn.Linear(3, 4),
        "another rank": nn.Linear(4, 3),
        "pooled over rows": nn.Sequential(
            nn.Flatten(0, 1), nn.Unflatten(0, (1, -1, 4)), nn.MaxPool2d((3, 1), 1, (1, 0))
        ),
    }


MIXERS = (
    "flattened", "flattened, counted from behind", "two rows an image", "rows as channels", "normalised over rows",
    "added to each other", "added to another size", "another number of features", "another rank", "pooled over rows",
)  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
def test_modules_that_lay_rows_over_each_other_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from privrep.federated.wire import module_codec as modules

    with monkeypatch.context() as sender:  # a sender that checks nothing
        sender.setattr(modules, "_make_adapted", modules.Adapted)
        text, arrays = encode(one_step(mixers()[name], torch.nn.Linear(4, 3), 4, 4))
    with pytest.raises(InputError, match="cannot be used"):
        decode(text, arrays)


def test_a_network_for_rows_of_another_length_is_refused() -> None:
    torch = pytest.importorskip("torch")
    text, arrays = encode(one_step(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3), 4, 2))
    assert decode(text, arrays, 4).rows_per_user == 4  # type: ignore[union-attr]
    with pytest.raises(InputError, match="rows of 2 numbers"):
        decode(text, arrays, 2)


INSIDE = {"layer": "ReLU", "arguments": {"inplace": False}, "tensors": {}, "inside": {}}
LAYER_LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another layer": lambda tree: tree.update(layer="BatchNorm1d"),
    "a module of torch": lambda tree: tree.update(layer="Module"),
    "enormous": lambda tree: tree["arguments"].update(in_features=1 << 60),
    "negative": lambda tree: tree["arguments"].update(in_features=-4),
    "a text": lambda tree: tree["arguments"].update(in_features="4"),
    "an argument more": lambda tree: tree["arguments"].update(device="cuda"),
    "an argument less": lambda tree: tree["arguments"].pop("bias"),
    "an object": lambda tree: tree["arguments"].update(in_features={"x": 1}),
    "a tensor less": lambda tree: tree["tensors"].pop("bias"),
    "tensors exchanged": lambda tree: tree.update(
        tensors={"weight": tree["tensors"]["bias"], "bias": tree["tensors"]["weight"]}
    ),
    "no boolean": lambda tree: tree["tensors"]["bias"].update(trained=1),
    "something inside": lambda tree: tree["inside"].update(x=INSIDE),
    "a key more": lambda tree: tree.update(x=1),
}
"""What a sender changes in the description of nn.Linear(4, 2)."""


@pytest.mark.parametrize("lie", LAYER_LIES)
def test_a_lie_about_a_layer_is_one_sentence(lie: str) -> None:
    torch = pytest.importorskip("torch")
    text, arrays = encode(one_step(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3), 4, 2))
    tree = json.loads(text)
    LAYER_LIES[lie](tree["fields"]["split"]["fields"]["representation"]["part"])
    with pytest.raises(InputError) as told:
        decode(json.dumps(tree), arrays)
    assert "\n" not in str(told.value)


def test_reading_a_module_draws_nothing_and_refuses_whole_numbers() -> None:
    torch = pytest.importorskip("torch")
    text, arrays = encode(one_step(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3), 4, 2))
    before = torch.get_rng_state()
    decode(text, arrays)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(InputError):
        decode(text, {name: array.astype(np.int64) for name, array in arrays.items()})


# A step that would count a user several times, or lay users over each other


def test_an_array_with_an_axis_more_is_refused() -> None:
    several = np.repeat(np.eye(4)[None, :, :2], 50, axis=0)
    step = PowerStep(several, FeatureTransform.plain(4), intercept=False)
    rng = np.random.default_rng(0)
    alone = InMemoryUsers(UserTable.from_rows(rng.normal(size=(8, 4)), rng.normal(size=8), np.zeros(8, int)))
    with pytest.raises(InputError, match="sent 50 contributions of 1 users"):  # it would count one user fifty times
        alone.sums(step, {"image": Bound(1e-3, 8)})
    with pytest.raises(InputError, match="field basis"):
        decode(*encode(step))


def test_a_step_for_one_target_is_refused_where_there_are_several() -> None:
    text, arrays = encode(QuarterEquations(np.eye(4)[:, :2], 1.0, 1.0))
    assert isinstance(decode(text, arrays, 4, 1), QuarterEquations)
    with pytest.raises(InputError, match="one target"):
        decode(text, arrays, 4, 2)


def test_a_matrix_far_wider_than_rows_is_refused() -> None:
    wide = encode(PowerStep(np.ones((4, WIDEST + 1)), FeatureTransform.plain(4), intercept=False))
    with pytest.raises(InputError, match="more than 4,096 rows or columns"):
        decode(*wide, 4, 1)
    assert isinstance(decode(*wide, WIDEST + 1, 1), PowerStep)
    with pytest.raises(InputError, match="classes, and there are 2 to 1,000"):
        decode(*encode(Encoded(gradient(), 1001)), 4, 1)


@pytest.mark.parametrize("classes", [-1, 0, 1, 1001, 10**12])
def test_a_loss_of_too_many_classes_is_refused(classes: int) -> None:
    mean = PriorMean(
        np.zeros(3), np.zeros((4, 3)), np.zeros(4), np.ones(4), np.eye(4), np.ones(4), np.zeros((4, 3)), True
    )
    loss = Loss("log", 3)
    text, arrays = encode(ClassGradient(np.eye(4)[:, :2], FeatureTransform.plain(4), 0.1, 1.0, True, loss, mean, 1.0))
    assert isinstance(decode(text, dict(arrays), 4, 1), ClassGradient)
    assert '"classes":3' in text
    with pytest.raises(InputError, match="classes, and there are 2 to 1,000"):
        decode(text.replace('"classes":3', f'"classes":{classes}'), arrays, 4, 1)

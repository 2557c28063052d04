"""A pretrained network of one's own that stays as it is: BatchNorm, images, features that are kept, and progress."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from privrep import Centaur  # noqa: E402
from privrep.errors import InputError  # noqa: E402
from privrep.neural.features import Dct, Frozen  # noqa: E402

SIDE, CLASSES = 6, 3
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> Rows:
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, 40 * 8)
    X = 0.7 * rng.normal(size=(len(y), SIDE * SIDE)) + np.eye(CLASSES, SIDE * SIDE)[y] * 2
    return X.astype(np.float32), y, np.repeat(np.arange(40), 8)


def small(**options: Any) -> Centaur:
    return Centaur(**{"classes": CLASSES, "epsilon": 4.0, "random_state": 0, "rows": 8, "rounds": 2, **options})


def public(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give a module weights and statistics as if it had been trained, and leave it in training mode."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape) + 0.5)
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return module.train()


def normalised() -> nn.Module:
    return public(nn.Sequential(nn.Linear(36, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.5)))


def unadaptable(norm: bool = False) -> nn.Module:
    """Return a module that has neither nn.Linear nor nn.Conv2d."""
    layers = [nn.Unflatten(1, (1, 36)), nn.Conv1d(1, 3, 12, stride=6), *([nn.BatchNorm1d(3)] if norm else [])]
    return public(nn.Sequential(*layers, nn.ReLU(), nn.Flatten()))


def of_images() -> nn.Module:
    return public(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    )


# BatchNorm


@pytest.mark.filterwarnings("ignore::privrep.errors.NothingLearned")
@pytest.mark.parametrize("share", ["auto", "linear", "directions", "nothing"])
def test_batch_norm_is_a_constant_of_a_network_that_stays_as_it_is(rows: Rows, share: str) -> None:
    module = normalised()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = small(representation=module, pretrained=True, share=share).fit(*rows)
    assert isinstance(model.map_, Frozen)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(rows[0])).numpy()
    np.testing.assert_allclose(model.map_(rows[0]), expected, atol=1e-5)
    assert model.score(*rows) > 0.4


def test_features_of_a_row_are_its_own_whatever_its_company(rows: Rows) -> None:
    chosen = Frozen.of(of_images(), (SIDE, SIDE, 1))
    together = chosen(rows[0][:20])
    wild = rows[0][:20].copy()
    wild[1:] = 1e30
    np.testing.assert_array_equal(chosen(rows[0][7:8])[0], together[7])
    np.testing.assert_array_equal(chosen(wild)[0], together[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"BatchNorm1d: .* Or leave its weights as they are: pretrained=True and share='auto'\.$"),
        ({"share": "linear"}, "BatchNorm1d"),
        ({"share": "all"}, "BatchNorm1d"),
        ({"share": "all", "pretrained": True}, r"BatchNorm1d: .* Or leave its weights as they are: share='auto'\.$"),
        ({"share": "adapters", "pretrained": True}, "BatchNorm1d"),
    ],
)
def test_batch_norm_is_refused_where_the_network_would_be_trained(
    rows: Rows, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        small(representation=normalised(), run_folder=tmp_path / "run", **options).fit(*rows)
    assert not (tmp_path / "run").exists()


# Plans


@pytest.mark.parametrize("make", [normalised, unadaptable, lambda: unadaptable(norm=True)])
def test_a_plan_says_that_a_linear_layer_on_a_frozen_network_is_shared(make: Any) -> None:
    plan = Centaur(representation=make(), pretrained=True, classes=10, epsilon=1.0).planned(60, 36)
    assert plan.share in ("linear", "nothing")
    plan = Centaur(representation=make(), pretrained=True, classes=CLASSES, epsilon=1.0).planned(100, 36)
    assert plan.share == "linear"
    assert "a linear layer on" in plan.words
    assert "outputs of the frozen network" in plan.words


def test_a_plan_says_why_the_network_is_not_trained() -> None:
    plan = small(representation=normalised(), pretrained=True).planned(100_000, 36)
    assert plan.share == "linear"
    assert "The network itself is not trained: the representation's layer '1' is a BatchNorm1d" in plan.words
    assert plan.words.endswith(".")
    images = small(representation=of_images(), pretrained=True, image=(SIDE, SIDE, 1)).planned(100_000, 36)
    assert "not trained: it takes images" in images.words
    trainable = small(representation=unadaptable(), pretrained=True).planned(100_000, 36)
    assert trainable.share == "all"  # so many users can carry all of it


def test_there_is_nothing_to_adapt_where_that_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"nn\.Linear or nn\.Conv2d"):
        small(representation=unadaptable(), pretrained=True, share="adapters").planned(100, 36)


def test_a_network_without_layers_to_adapt_is_fitted_and_loaded(rows: Rows, tmp_path: Path) -> None:
    model = small(representation=unadaptable(norm=True), pretrained=True).fit(*rows)
    model.save(tmp_path / "model")
    back = Centaur.load(tmp_path / "model", unadaptable(norm=True))
    np.testing.assert_array_equal(back.predict_proba(rows[0], rows[2]), model.predict_proba(rows[0], rows[2]))
    with torch.no_grad():
        other = unadaptable(norm=True)
        other[2].running_mean += 1
    with pytest.raises(InputError, match="other layers or weights"):
        Centaur.load(tmp_path / "model", other)


# Images


def test_a_network_that_takes_images_gets_them_channels_first(rows: Rows) -> None:
    module = of_images()
    model = small(representation=module, pretrained=True, image=(SIDE, SIDE, 1), share="linear").fit(*rows)
    assert isinstance(model.map_, Frozen)
    assert model.map_.shape == (SIDE, SIDE, 1)
    with torch.no_grad():
        expected = module(torch.from_numpy(rows[0]).reshape(-1, 1, SIDE, SIDE)).numpy()
    np.testing.assert_allclose(model.map_(rows[0]), expected, atol=1e-5)
    with pytest.raises(InputError, match="representation cannot take rows of 36 numbers"):
        small(representation=module, pretrained=True).planned(40, 36)
    with pytest.raises(InputError, match=r"representation cannot take images of \(4, 3, 3\)"):
        small(representation=module, pretrained=True, image=(4, 3, 3)).planned(40, 36)


def test_an_image_classifier_of_transformers_in_three_lines(rows: Rows) -> None:
    """The document's example, with random weights in place of a download."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes)
    torch.manual_seed(0)
    network = transformers.ResNetModel(config)
    model = small(representation=network, pretrained=True, image=(SIDE, SIDE, 1), share="linear").fit(*rows)
    assert (model.map_.size, model.learned_.head_sizes.own) == (6, 6)
    with torch.no_grad():
        pooled = network.eval()(torch.from_numpy(rows[0][:3]).reshape(3, 1, SIDE, SIDE)).pooler_output
    np.testing.assert_allclose(model.map_(rows[0][:3]), pooled.flatten(1).numpy(), atol=1e-5)
    assert np.isfinite(model.predict_proba(rows[0], rows[2])).all()
    scores = Frozen.of(transformers.ResNetForImageClassification(config), (SIDE, SIDE, 1))
    assert scores.size == config.num_labels


# What cannot be a public map


class Draws(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows, 0.5, training=True)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += 1
        return rows


class Picky(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        if (rows.abs() > 9).any():
            raise ValueError("out of range")
        return rows


class Words(nn.Module):
    def forward(self, rows: Tensor) -> str:
        return "a cat"


class Lasting(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows[rows > 0.1][None]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Draws(), "says something else of the same row"),
        (Counts(), "buffer 'seen' changes"),
        (Picky(), "could stop the fit"),
        (Words(), "cannot take rows of 36 numbers: it returns no tensor"),
        (Lasting(), "equally many numbers"),
        (nn.Linear(35, 2), "cannot take rows of 36 numbers"),
    ],
)
def test_what_is_no_function_of_a_row_is_refused(module: nn.Module, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        Frozen.of(module, (36,))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=sentence):
        small(representation=module, pretrained=True, share="linear").planned(40, 36)


# Features that are kept


class Counted(nn.Module):
    """A map that counts how many rows it has seen."""

    def __init__(self, seed: int = 0, last: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.inside = public(nn.Sequential(nn.Linear(36, 7), nn.BatchNorm1d(7), last()), seed)
        self.rows = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.rows += len(rows)
        result: Tensor = self.inside(rows)
        return result


def test_features_are_computed_once_and_kept_for_their_owner(rows: Rows, tmp_path: Path) -> None:
    X, _, groups = rows
    plain = small(representation=Counted(), pretrained=True, share="linear").fit(*rows)
    for options in ({"representation": (one := Counted()), "pretrained": True}, {"features": Frozen.of(one, (36,))}):
        cache = tmp_path / f"cache {len(options)}"
        first = small(share="linear", cache=cache, **options).fit(*rows)
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        (file,) = cache.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        one.rows = 0
        again = small(share="linear", cache=cache, **options, epsilon=5.0).fit(*rows)
        assert one.rows < 40  # those that it was tried on, and none of 320
        assert list(cache.iterdir()) == [file]
        assert again.described_["config"]["epsilon"] == 5.0
        for model in (first, small(share="linear", cache=cache, **options).fit(*rows)):
            np.testing.assert_array_equal(model.learned_.weights, plain.learned_.weights)
            np.testing.assert_array_equal(model.predict_proba(X, groups), plain.predict_proba(X, groups))


def test_what_is_kept_is_of_these_layers_numbers_and_rows_alone(rows: Rows, tmp_path: Path) -> None:
    X, cache = rows[0][:5], tmp_path / "cache"
    maps = [Frozen.of(m, (36,), cache=cache) for m in (Counted(), Counted(seed=1), Counted(last=nn.ReLU))]
    statistics = Counted()
    statistics.inside[1].running_var += 1
    maps.append(Frozen.of(statistics, (36,), cache=cache))
    found = [chosen(X) for chosen in maps]
    assert len(list(cache.iterdir())) == 4
    for chosen, features in zip(maps, found, strict=True):
        np.testing.assert_array_equal(Frozen(chosen.module, "plain", (36,), 7)(X), features)
        np.testing.assert_array_equal(chosen(X), features)
    other = X.copy()
    other[0, 0] += 1
    assert not np.array_equal(maps[0](other)[0], found[0][0])
    assert len(list(cache.iterdir())) == 5
    assert maps[0](X[:0]).shape == (0, 7)


def test_a_cache_that_others_can_enter_or_that_is_broken_is_refused(rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(InputError, match="can be entered by others"):
        Frozen.of(Counted(), (36,), cache=tmp_path / "open")(rows[0][:3])
    assert list((tmp_path / "open").iterdir()) == []
    with pytest.raises(InputError, match="cache must be the path of a folder"):
        small(cache=3).fit(*rows)
    chosen = Frozen.of(Counted(), (36,), cache=tmp_path / "cache")
    chosen(rows[0][:3])
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(b"broken")
    with pytest.raises(InputError, match="delete it"):
        chosen(rows[0][:3])


def test_what_is_kept_is_no_part_of_a_model(rows: Rows, tmp_path: Path) -> None:
    kept = small(representation=Counted(), pretrained=True, share="linear", cache=tmp_path / "cache").fit(*rows)
    plain = small(representation=Counted(), pretrained=True, share="linear").fit(*rows)
    assert kept.described_ == plain.described_
    kept.save(tmp_path / "model")
    back = Centaur.load(tmp_path / "model", Counted(), cache=tmp_path / "cache")
    np.testing.assert_array_equal(back.predict(rows[0], rows[2]), plain.predict(rows[0], rows[2]))


def test_progress_counts_rows(rows: Rows) -> None:
    told: list[tuple[int, int]] = []
    small(
        representation=Counted(),
        pretrained=True,
        share="linear",
        on_progress=lambda done, all_: told.append((done, all_)),
    ).fit(*rows)
    assert told == [(64, 320), (128, 320), (192, 320), (256, 320), (320, 320)]
    told.clear()
    Frozen.of(Counted(), (36,), on_progress=lambda done, all_: told.append((done, all_)))(rows[0][:70])
    assert told == [(64, 70), (70, 70)]


def test_another_map_leaves_a_pretrained_network_out(rows: Rows) -> None:
    model = small(representation=normalised(), pretrained=True, features=Dct(6, 6, 1, 10), share="linear").fit(*rows)
    assert isinstance(model.map_, Dct)
    assert "frozen network" not in model.plan_.words

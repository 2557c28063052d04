"""A network in two parts: flat public weights, what is refused, and hashes of modules."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from privrep.errors import InputError  # noqa: E402
from privrep.neural.models import add_adapters, initialise, lenet, mlp  # noqa: E402
from privrep.nn.flat_module import FlatModule, fingerprint, fingerprints, split  # noqa: E402
from privrep.nn.ghost_clipping import find_obstacle  # noqa: E402


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), nn.Linear(3, 4)


def test_sizes_are_read_off_the_modules():
    parts = split(*network(), 6)
    assert (parts.features, parts.rank, parts.classes) == (6, 3, 4)
    assert parts.representation.size == 6 * 5 + 5 + 5 * 3 + 3
    assert parts.head.size == 3 * 4 + 4


def test_flat_weights_are_the_modules_own_in_order():
    part = FlatModule(network()[0])
    expected = np.concatenate([p.detach().numpy().ravel() for p in part.module.parameters()])
    assert np.array_equal(part.weights(), expected)
    rows = torch.cos(torch.arange(18.0)).reshape(3, 6)
    assert torch.equal(part(torch.tensor(part.weights()), rows), part.module(rows))


def test_weights_are_a_copy_and_load_puts_them_back():
    part = FlatModule(network()[0])
    before = part.weights()
    part.load(before + 1)
    assert np.array_equal(part.weights(), before + 1)
    assert not np.array_equal(part.weights(), before)


def test_other_weights_leave_the_module_as_it_was():
    part = FlatModule(network()[0])
    before = part.weights()
    part(torch.zeros(part.size), torch.ones(2, 6))
    assert np.array_equal(part.weights(), before)


def test_named_weights_of_many_users_have_the_users_first():
    part = FlatModule(network()[0])
    flat = torch.arange(2.0 * part.size).reshape(2, part.size)
    named = part.unflatten(flat)
    assert named["0.weight"].shape == (2, 5, 6)
    assert torch.equal(torch.cat([named[name].flatten(1) for name in part.shapes], dim=1), flat)


def test_frozen_parameters_are_in_no_weights():
    representation, head = network()
    representation[0].requires_grad_(False)
    part = split(representation, head, 6).representation
    assert list(part.shapes) == ["2.weight", "2.bias"]
    part.load(np.zeros(part.size, np.float32))
    assert representation[0].weight.abs().sum() > 0


def test_a_frozen_representation_has_no_weights():
    representation, head = network()
    part = split(representation.requires_grad_(False), head, 6).representation
    assert part.size == 0
    assert part.weights().shape == (0,)
    assert part(torch.zeros(0), torch.ones(2, 6)).shape == (2, 3)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows):
        self.seen += 1
        return rows


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(5), "'1' is a BatchNorm1d.*GroupNorm"),
        (nn.Dropout(0.5), "'1' is a Dropout.*p=0"),
        (nn.RReLU(), "'1' is a RReLU.*LeakyReLU"),
        (Remembers(), "buffer '1.seen' changes"),
        (nn.Linear(4, 5), "cannot take rows of 6 numbers"),
        (nn.Unflatten(1, (5, 1)), "vector"),
    ],
)
def test_what_would_carry_data_between_users_is_refused(layer, words):
    with pytest.raises(InputError, match=words):
        split(nn.Sequential(nn.Linear(6, 5), layer), nn.Linear(5, 4), 6)


def test_harmless_layers_are_taken():
    layers = nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.Dropout(0)
    assert split(nn.Sequential(*layers), nn.Linear(6, 4), 6).rank == 6


@pytest.mark.parametrize("head", [nn.Linear(3, 1), nn.Linear(7, 4), nn.Linear(3, 4).requires_grad_(False), nn.ReLU()])
def test_heads_that_do_not_fit_are_refused(head):
    with pytest.raises(InputError, match="head"):
        split(network()[0], head, 6)


# Models


def test_the_papers_networks_have_the_papers_sizes():
    assert split(*mlp(), 784).representation.size == 784 * 256 + 256 + 256 * 128 + 128 + 128 * 16 + 16
    ten, hundred = split(*lenet(), 3072), split(*lenet(hidden=(128, 32), classes=100), 3072)
    convolutions = 75 * 64 + 64 + 1600 * 64 + 64
    assert ten.representation.size == convolutions + 1600 * 384 + 384 + 384 * 32 + 32
    assert hundred.representation.size == convolutions + 1600 * 128 + 128 + 128 * 32 + 32
    assert (ten.rank, ten.classes, hundred.classes) == (32, 10, 100)


def test_weights_at_the_start_are_public_and_need_no_seed():
    torch.manual_seed(1)
    one = split(*lenet(1, 28), 784)
    torch.manual_seed(2)
    two = split(*lenet(1, 28), 784)
    assert np.array_equal(one.representation.weights(), two.representation.weights())
    assert np.array_equal(one.head.weights(), two.head.weights())
    first = mlp()[0][0]
    assert float(first.weight.detach().abs().max()) <= (6 / 784) ** 0.5
    assert abs(float(first.weight.detach().std()) / (2 / 784) ** 0.5 - 1) < 0.01
    assert not first.bias.detach().any()


def test_layers_of_equal_shape_start_with_different_weights():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    initialise(module, "any")
    assert not torch.equal(module[0].weight, module[1].weight)


def test_images_are_rows_with_channels_last():
    image = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    seen = lenet(3, 16)[0][0](torch.tensor(image.reshape(2, -1)))
    assert np.array_equal(seen.numpy(), image.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("make", [lambda: mlp(30, (8, 4)), lambda: lenet(2, 16, (6, 4))])
def test_an_adapted_network_starts_as_the_network_and_shares_little(make):
    representation, head = make()
    features = 30 if isinstance(representation[0], nn.Linear) else 512
    whole, small = split(representation, head, features), split(add_adapters(representation, 2), head, features)
    rows = torch.cos(torch.arange(3.0 * features)).reshape(3, features)
    assert torch.allclose(small.representation.module(rows), whole.representation.module(rows), atol=1e-6)
    assert all(".down." in name or ".up." in name for name in small.representation.shapes)
    assert all(p.requires_grad for p in representation.parameters())
    moved = torch.tensor(small.representation.weights()) + 0.1
    assert not torch.allclose(small.representation(moved, rows), whole.representation.module(rows), atol=1e-3)


def test_there_must_be_something_to_adapt():
    with pytest.raises(InputError, match="nothing to adapt"):
        add_adapters(nn.ReLU(), 2)
    with pytest.raises(InputError, match="at least 1"):
        add_adapters(nn.Linear(3, 3), 0)
    with pytest.raises(InputError, match="too small"):
        lenet(1, 12)


class PositionsFirst(nn.Module):
    """A linear layer that sees positions before rows, as many transformers do; every row by itself all the same."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows):
        return self.layer(rows.reshape(len(rows), -1, 4).transpose(0, 1)).mean(dim=0)


def test_a_layer_that_sees_rows_in_another_order_is_left_to_several_steps():
    """One pass would clip users in each other's place: the total gradient is right, each one's is not."""
    both = split(PositionsFirst(), nn.Linear(3, 2), 32)
    assert "another order" in find_obstacle(both)


class Reduced(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.layer, self.reduction = nn.Linear(10, 3), reduction

    def forward(self, rows):
        return self.layer(rows - self.reduction(rows))


@pytest.mark.parametrize(
    "reduction",
    [torch.min, torch.max, torch.mean, lambda x: x.mean(dim=0), lambda x: x[-1:], lambda x: x.roll(1, 0) * 1e-3],
    ids=["min", "max", "mean", "mean of columns", "last", "neighbour"],
)
def test_rows_that_meet_are_noticed(reduction):
    with pytest.raises(InputError, match="mixes rows"):
        split(Reduced(reduction), nn.Linear(3, 2), 10)


class Words(nn.Module):
    def __init__(self, clamped):
        super().__init__()
        self.table, self.clamped = nn.Embedding(50, 4), clamped

    def forward(self, rows):
        rows = rows.nan_to_num().clamp(0, 49) if self.clamped else rows
        return self.table(rows.long()).flatten(1)


def test_a_module_that_fails_on_some_numbers_is_refused():
    with pytest.raises(InputError, match="clamp its input"):
        split(Words(clamped=False), nn.Linear(40, 2), 10)
    assert split(Words(clamped=True), nn.Linear(40, 2), 10).rank == 40


# Hashes of modules: what is frozen always counts, what is trained only if it is asked for


def frozen_first(seed: int = 0, frozen: int = 0) -> nn.Module:
    torch.manual_seed(frozen)
    first = nn.Linear(3, 2).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(first, nn.Linear(2, 2))


def test_trained_weights_count_only_where_they_are_asked_for() -> None:
    one, other = frozen_first(seed=1), frozen_first(seed=2)
    assert fingerprint(one, trainable=False) == fingerprint(other, trainable=False)
    assert fingerprint(one, trainable=True) != fingerprint(other, trainable=True)
    assert fingerprints(one) == {
        "all": fingerprint(one, trainable=True),
        "frozen": fingerprint(one, trainable=False),
    }


def test_frozen_weights_and_buffers_always_count() -> None:
    for trainable in (True, False):
        assert fingerprint(frozen_first(frozen=1), trainable=trainable) != fingerprint(
            frozen_first(frozen=2), trainable=trainable
        )
        thawed = frozen_first().requires_grad_(True)
        assert fingerprint(thawed, trainable=trainable) != fingerprint(frozen_first(), trainable=trainable)
        norm = nn.BatchNorm1d(3)
        before = fingerprint(norm, trainable=trainable)
        norm.running_mean += 1
        assert fingerprint(norm, trainable=trainable) != before

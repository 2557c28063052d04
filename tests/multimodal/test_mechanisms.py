"""What users of DP-CLIP compute, by each mechanism: the gradients that differentiation gives, nobody's by anyone else's
rows, and no further apart than is stated."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from clipping import add_up, check_sum, clip_to_numbers
from privrep.privacy.protocol import UserBatch
from privrep.users.performance import Performance
from strangers import assert_nobody_else_moves, replacements, strangers

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from privrep.data.table import UserTable  # noqa: E402
from privrep.errors import InputError  # noqa: E402
from privrep.multimodal.mechanisms import bank as bank_module  # noqa: E402
from privrep.multimodal.mechanisms.bank import BankStep  # noqa: E402
from privrep.multimodal.mechanisms.batch import BatchStep, differentiate_clip_loss  # noqa: E402
from privrep.multimodal.mechanisms.pairwise import InsideStep, check_inside  # noqa: E402
from privrep.multimodal.pairs import Pairs  # noqa: E402
from privrep.multimodal.towers import Layout, layout_of, make_towers, normalise_rows  # noqa: E402
from privrep.privacy import contributions as kinds  # noqa: E402
from privrep.privacy.bounds import BATCH_SLACK, Bound  # noqa: E402
from privrep.privacy.grid import measure_rounding  # noqa: E402
from privrep.users.memory import InMemoryUsers  # noqa: E402

IMAGE, TEXT, DIM, CAPTIONS, USERS = 7, 5, 3, 4, 6
BANK = np.cos(1.7 * np.arange(CAPTIONS * TEXT)).reshape(CAPTIONS, TEXT).astype(np.float32)
TEMPERATURE = 0.4


def started(*layers):
    """A module whose weights are of no special kind."""
    module = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
    with torch.no_grad():
        for place, p in enumerate(module.parameters()):
            p.copy_(0.6 * torch.sin(1.3 * torch.arange(float(p.numel())) + place + 1).reshape(p.shape))
    return module


def encoders(kind):
    match kind:
        case "linear":
            return started(nn.Linear(IMAGE, DIM, bias=False)), started(nn.Linear(TEXT, DIM, bias=False))
        case "deep":
            image = started(nn.Linear(IMAGE, 6), nn.Tanh(), nn.Linear(6, DIM))
            return image, started(nn.Linear(TEXT, 4), nn.Tanh(), nn.Linear(4, DIM, bias=False))
        case "one by one":
            return started(nn.Linear(IMAGE, DIM), nn.LayerNorm(DIM)), started(nn.Linear(TEXT, DIM), nn.Tanh())
        case "frozen texts":
            return started(nn.Linear(IMAGE, DIM)), started(nn.Linear(TEXT, DIM)).requires_grad_(False)
        case "frozen images":
            return started(nn.Linear(IMAGE, DIM)).requires_grad_(False), started(nn.Linear(TEXT, DIM))
    raise AssertionError(kind)


KINDS = ["linear", "deep", "one by one", "frozen texts", "frozen images"]


def model(kind="linear", *, learn_scale=False, cosine=True):
    return make_towers(*encoders(kind), IMAGE, TEXT, learn_scale, cosine)


def bank_step(kind, slots, *, free=True, learn_scale=True, cosine=True):
    found = model(kind, learn_scale=learn_scale, cosine=cosine)
    layout = Layout(IMAGE, TEXT if free else 0, BANK)
    return BankStep(found, found.weights(TEMPERATURE), layout, TEMPERATURE, slots)


def crowd(slots, free, users=USERS, seed=0):
    """Users with captions of the bank and of their own, some rows absent or with a target that is no caption."""
    rng = np.random.default_rng([seed, slots])
    X = rng.normal(size=(users, slots, IMAGE + free * TEXT)).astype(np.float32)
    y = rng.integers(0, CAPTIONS + free, (users, slots)).astype(np.float32)
    y[1] = -1
    y[2, -1], y[3, 0] = (CAPTIONS, 0) if free else (1, CAPTIONS)  # the latter is no caption where rows have none
    if slots > 1:
        y[4, 1:], y[5, 0] = -1, 2.5
    X[y == -1] = 0
    return X, y


def sent(step, X, y):
    with threadpool_limits(1, user_api="blas"), np.errstate(all="ignore"):
        return step(UserBatch(X, y, np.arange(len(X))))["gradient"]


def vectors(contributions, users):
    """(users, size): what each user sends, written out."""
    return np.stack([add_up(contributions, np.eye(users)[user]) for user in range(users)])


def leaves(step):
    """Weights of images, weights of texts and the logarithm of the scale, to differentiate in."""
    image, text, log_scale = step.towers.split_weights(step.weights, step.temperature)
    return image.requires_grad_(), text.requires_grad_(), torch.tensor(log_scale, requires_grad=True)


def plain_loss(step, X, y, image, text, bank, log_scale):
    """The mean loss of one user's pairs, one pair after the other."""
    layout, losses = step.layout, []
    for row, target in zip(torch.tensor(X), y.tolist(), strict=True):
        if target not in range(layout.free + (layout.text_numbers > 0)):
            continue
        u = step.towers.image(image, row[None, :IMAGE])[0]
        u = u / u.norm() if step.towers.cosine else u
        logits = [torch.dot(u, v) for v in bank]
        if target == layout.free:
            own = step.towers.text(text, row[None, IMAGE:])[0]
            logits.append(torch.dot(u, own / own.norm()))
        logits = torch.stack(logits) * log_scale.exp()
        losses.append(functional.cross_entropy(logits[None], torch.tensor([int(target)])))
    return sum(losses) / len(losses) if losses else 0 * log_scale


def plain_bank(step, text):
    found = step.towers.text(text, torch.tensor(BANK))
    return found / found.norm(dim=1, keepdim=True)


def differentiated(loss, wanted):
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    pieces = [torch.zeros(w.numel()) if g is None else g.reshape(-1) for g, w in zip(found, wanted, strict=True)]
    return torch.cat(pieces).double().numpy()


def plain_gradient(step, X, y):
    """Of one user, in what is released: weights of images, of texts where captions are in rows, bank, scale."""
    image, text, log_scale = leaves(step)
    bank = plain_bank(step, text).detach().requires_grad_()
    learns = step.towers.text.size > 0
    own = [text] if learns and step.layout.text_numbers else []
    wanted = [image, *own, *([bank] if learns else []), *([log_scale] if step.towers.learn_scale else [])]
    return differentiated(plain_loss(step, X, y, image, text, bank, log_scale), wanted)


# The bank


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_users_send_the_gradient_of_their_mean_loss_in_every_part(kind, slots, free, cosine):
    step = bank_step(kind, slots, free=free, cosine=cosine)
    assert step.by_layers == (kind != "one by one")
    X, y = crowd(slots, free)
    expected = np.stack([plain_gradient(step, X[user], y[user]) for user in range(USERS)])
    assert expected.shape == (USERS, step.size)
    found = sent(step, X, y)
    assert vectors(found, USERS) == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())
    lengths = np.linalg.norm(expected, axis=1)
    assert (found.norms() >= lengths * (1 - 1e-5)).all()
    assert found.norms() == pytest.approx(lengths, rel=0.02, abs=1e-6)
    assert lengths[1] == 0 < lengths[0]
    assert (np.abs(expected).max(axis=0) > 1e-4).mean() > 0.8  # no part was idle


def test_one_user_alone_sends_the_same():
    step = bank_step("deep", 3)
    X, y = crowd(3, True)
    together = vectors(sent(step, X, y), USERS)
    for user in range(USERS):
        alone = vectors(sent(step, X[[user]], y[[user]]), 1)[0]
        assert alone == pytest.approx(together[user], abs=1e-6)


@pytest.mark.parametrize("learn_scale", [True, False])
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_in_all_weights_follows_from_the_sum(kind, free, learn_scale, monkeypatch):
    monkeypatch.setattr(bank_module, "AT_ONCE", 3)  # texts that are differentiated at a time
    step = bank_step(kind, 3, free=free, learn_scale=learn_scale)
    X, y = crowd(3, free)
    image, text, log_scale = leaves(step)
    bank = plain_bank(step, text)
    loss = sum(plain_loss(step, X[user], y[user], image, text, bank, log_scale) for user in range(USERS))
    expected = differentiated(loss, [image, text, *([log_scale] if learn_scale else [])])
    found = step.to_gradient(add_up(sent(step, X, y), np.ones(USERS)))
    assert found.shape == (step.towers.size,)
    assert found == pytest.approx(expected, abs=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("kind", ["linear", "deep"])
def test_layer_by_layer_and_one_by_one_agree(kind, free):
    X, y = crowd(3, free)
    one, other = bank_step(kind, 3, free=free), bank_step(kind, 3, free=free)
    other.__dict__["by_layers"] = False
    assert (one.spec.floats_per_user, other.spec.floats_per_user) == (0, other.size)
    first, second = vectors(sent(one, X, y), USERS), vectors(sent(other, X, y), USERS)
    assert first == pytest.approx(second, abs=2e-6 * np.abs(second).max())


def test_vectors_are_held_of_convolutions():
    images = started(nn.Unflatten(1, (1, 1, IMAGE)), nn.Conv2d(1, 2, (1, 3)), nn.Flatten(), nn.Linear(10, DIM))
    found = make_towers(images, encoders("linear")[1], IMAGE, TEXT)
    step = BankStep(found, found.weights(TEMPERATURE), Layout(IMAGE, 0, BANK), TEMPERATURE, 1)
    assert (step.by_layers, step.spec.floats_per_user) == (True, 6 + 2)
    X, y = crowd(1, False)
    expected = np.stack([plain_gradient(step, X[user], y[user]) for user in range(USERS)])
    assert vectors(sent(step, X, y), USERS) == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("p", "q"), [(2, 9), (9, 2)])
@pytest.mark.parametrize("few", [3, 512])
def test_products_are_weighted_whichever_side_is_the_narrower(p, q, few, monkeypatch):
    monkeypatch.setattr(kinds, "FEW_ROWS", few)
    rng = np.random.default_rng(8)
    left, right = (rng.normal(size=(11, 2, width)).astype(np.float32) for width in (p, q))
    weights = np.linspace(0.0, 2.0, 11)
    expected = np.einsum("u,urp,urq->pq", weights, left.astype(np.float64), right.astype(np.float64))
    check_sum(kinds.Products(left, right), weights, expected)


def test_what_is_no_caption_is_a_row_that_is_absent():
    y = np.array([[0, 3, 4, 5, -1, 2.5, 1e30, np.nan, -np.inf]], dtype=np.float32)
    with_, without = (Layout(IMAGE, numbers, BANK) for numbers in (TEXT, 0))
    assert with_.find_targets(y).tolist() == [[0, 3, 4, -1, -1, -1, -1, -1, -1]]
    assert without.find_targets(y).tolist() == [[0, 3, -1, -1, -1, -1, -1, -1, -1]]
    for kind in ("deep", "one by one"):
        step = bank_step(kind, 3)
        X, y = crowd(3, True)
        odd = y.copy()
        odd[0] = [2, 9, 0.5]
        expected = plain_gradient(step, X[0, :1], odd[0, :1])
        assert vectors(sent(step, X, odd), USERS)[0] == pytest.approx(expected, abs=1e-5)


def test_the_text_of_a_row_is_its_own_or_the_banks():
    layout = Layout(2, TEXT, BANK)
    rows = torch.arange(3.0 * (2 + TEXT)).reshape(3, -1)
    found = layout.find_texts(rows, torch.tensor([1, CAPTIONS, -1]))
    assert np.array_equal(found, np.stack([BANK[1], rows[1, 2:].numpy(), np.zeros(TEXT)]))
    assert np.array_equal(layout.take_images(rows), rows[:, :2])


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("kind", ["linear", "deep", "one by one"])
def test_a_user_in_anothers_place_changes_nobody_else(kind, free):
    step, bound = bank_step(kind, 3, free=free), 0.3
    clip, send = Bound(bound, step.size), partial(sent, step)
    total = clip_to_numbers(send(*crowd(3, free)), clip)
    after = assert_nobody_else_moves(send, crowd(3, free), strangers(*crowd(3, free, seed=9)), (0, 4))
    with np.errstate(all="ignore"):
        moved = [np.linalg.norm(clip_to_numbers(each, clip) - total) for each in after]
    assert max(moved) <= clip.sensitivity("replace-one-user")
    assert max(moved) > bound  # there was something to see


def test_a_scale_that_grows_stops_at_a_hundred():
    found = model(learn_scale=True)
    weights = found.weights(0.01)
    assert weights[-1] == pytest.approx(math.log(100))
    weights[-1] = 50
    assert found.split_weights(weights, 1.0)[2] == pytest.approx(math.log(100))
    assert model().split_weights(model().weights(0.5), 0.5)[2] == pytest.approx(math.log(2))


def test_embeddings_of_nothing_have_the_right_shape():
    found = model("deep")
    assert found.embed_images(found.weights(1.0), np.zeros((0, IMAGE), np.float32)).shape == (0, DIM)
    assert found.embed_texts(found.weights(1.0), BANK).shape == (CAPTIONS, DIM)


@pytest.mark.parametrize(
    ("image", "text", "words"),
    [
        (nn.Linear(IMAGE, 3), nn.Linear(TEXT, 2), "project one side"),
        (nn.Linear(IMAGE + 1, 3), nn.Linear(TEXT, 3), "image encoder cannot take"),
        (nn.Sequential(nn.Linear(IMAGE, 3), nn.BatchNorm1d(3)), nn.Linear(TEXT, 3), "BatchNorm1d"),
        (nn.Linear(IMAGE, 3), nn.Sequential(nn.Linear(TEXT, 3), nn.Dropout(0.1)), "text encoder's layer"),
        (nn.Linear(IMAGE, 3).requires_grad_(False), nn.Linear(TEXT, 3).requires_grad_(False), "nothing to learn"),
        (nn.Sequential(nn.Linear(IMAGE, 6), nn.Unflatten(1, (2, 3))), nn.Linear(TEXT, 3), "a vector"),
    ],
)
def test_encoders_that_do_not_fit_are_refused(image, text, words):
    with pytest.raises(InputError, match=words):
        make_towers(image, text, IMAGE, TEXT)


# The whole batch


def batch_step(kind="deep", slots=1, *, chunk=256, learn_scale=True, cosine=True):
    found = model(kind, learn_scale=learn_scale, cosine=cosine)
    return BatchStep(found, found.weights(TEMPERATURE), Layout(IMAGE, TEXT, BANK), TEMPERATURE, slots, chunk)


def plain_clip_gradient(step, X, y):
    image, text, log_scale = leaves(step)
    rows, targets = torch.tensor(X).flatten(0, 1), y.ravel()
    there = [place for place, target in enumerate(targets) if target in range(CAPTIONS + 1)]
    words = [rows[p, IMAGE:] if targets[p] == CAPTIONS else torch.tensor(BANK[int(targets[p])]) for p in there]
    u, v = step.towers.image(image, rows[there][:, :IMAGE]), step.towers.text(text, torch.stack(words))
    u, v = u / u.norm(dim=1, keepdim=True) if step.towers.cosine else u, v / v.norm(dim=1, keepdim=True)
    loss = torch.tensor(0.0)
    for i in range(len(there)):
        of_image = torch.stack([torch.dot(u[i], v[j]) for j in range(len(there))]) * log_scale.exp()
        of_text = torch.stack([torch.dot(u[j], v[i]) for j in range(len(there))]) * log_scale.exp()
        loss = loss - (torch.log_softmax(of_image, 0)[i] + torch.log_softmax(of_text, 0)[i]) / (2 * len(there))
    return differentiated(loss, [image, text, *([log_scale] if step.towers.learn_scale else [])])


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_sends_the_gradient_of_the_clip_loss(kind, cosine):
    step = batch_step(kind, 3, cosine=cosine)
    X, y = crowd(3, True)
    expected = plain_clip_gradient(step, X, y)
    found = sent(step, X, y).vector
    assert found.shape == (step.size,)
    assert found == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("kind", ["deep", "one by one", "frozen texts"])
def test_chunks_leave_the_gradient_what_it_is(kind, chunk):
    X, y = crowd(3, True)
    whole, few = (sent(batch_step(kind, 3, chunk=some), X, y).vector for some in (256, chunk))
    assert np.abs(whole).max() > 1e-3
    assert few == pytest.approx(whole, abs=32 * float(np.finfo(np.float32).eps) * float(np.abs(whole).max()))


class Remembers(nn.Module):
    """A module that adds what it gave before, once it is on: a check when it is made would see it."""

    before, on = 0.0, False

    def forward(self, rows):
        found = rows + self.before
        if self.on:
            self.before = found.detach().mean()
        return found


def test_a_module_that_remembers_carries_nothing_to_the_next_users(monkeypatch):
    towers = make_towers(started(nn.Linear(IMAGE, DIM), Remembers()), encoders("frozen texts")[1], IMAGE, TEXT)
    step = BankStep(towers, towers.weights(TEMPERATURE), Layout(IMAGE, 0, BANK), TEMPERATURE, 2)
    X, y = crowd(2, False)
    assert step.by_layers
    monkeypatch.setattr(Remembers, "on", True)
    alone = vectors(sent(step, X, y), USERS)
    sent(step, *crowd(2, False, seed=5))
    assert np.array_equal(vectors(sent(step, X, y), USERS), alone)
    assert alone.any()


def clip_loss(images, texts, log_scale, cosine=True):
    """The CLIP loss as PyTorch has it."""
    lengths = images.norm(dim=1, keepdim=True)
    logits = (images / lengths if cosine else images) @ (texts / texts.norm(dim=1, keepdim=True)).T * log_scale.exp()
    own = torch.arange(len(logits))
    return sum(torch.nn.functional.cross_entropy(each, own) for each in (logits, logits.T)) / 2


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("pairs", [2, 5, 40])
def test_slopes_of_the_loss_in_closed_form_are_those_of_pytorch(pairs, cosine):
    made = torch.Generator().manual_seed(pairs)
    images, texts = (torch.randn(pairs, 6, generator=made).requires_grad_() for _ in range(2))
    log_scale = torch.tensor(1.3, requires_grad=True)
    expected = torch.autograd.grad(clip_loss(images, texts, log_scale, cosine), [images, texts, log_scale])
    with torch.no_grad():
        found = differentiate_clip_loss(images, texts, log_scale, cosine)
        silent = differentiate_clip_loss(images * torch.tensor([0.0] + [1.0] * 5), texts * 0.0, log_scale, cosine)
    for own, other in zip(found, expected, strict=True):
        assert own.numpy() == pytest.approx(other.numpy(), rel=1e-4, abs=1e-6)
    assert all(torch.isfinite(each).all() for each in silent)


def test_the_loss_is_that_of_tables_of_similarities():
    images, texts = torch.eye(2), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    logits = np.array([[0.6, 0.0], [0.8, 1.0]]) * 5
    rows, columns = (np.log(np.exp(logits).sum(axis=axis)) for axis in (1, 0))
    expected = (rows.mean() + columns.mean()) / 2 - np.diag(logits).mean()
    assert float(clip_loss(images, texts, torch.tensor(math.log(5)))) == pytest.approx(expected, rel=1e-5)
    assert float(clip_loss(3 * images, texts, torch.tensor(math.log(5)))) == pytest.approx(expected, rel=1e-5)
    longer = clip_loss(3 * images, texts, torch.tensor(math.log(5 / 3)), cosine=False)
    assert float(longer) == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_one_pair_has_nothing_to_tell_apart():
    X, y = crowd(1, True)
    assert not sent(batch_step(), X[:1], y[:1]).vector.any()
    assert not sent(batch_step(), X[:2], y[:2]).vector.any()  # the second has no pair
    assert sent(batch_step(), X[2:4], y[2:4]).vector.any()


def total_of(step, bound, X, y):
    """Of the engine, with what is absent left out."""
    users = [(X[u, y[u] != -1], y[u, y[u] != -1]) for u in range(len(X))]
    offsets = np.cumsum([0, *(len(targets) for _, targets in users)]).astype(np.int64)
    flat = np.concatenate([rows for rows, _ in users]), np.concatenate([targets for _, targets in users])
    table = table_of(*flat, offsets)
    return InMemoryUsers(table, Performance(1)).sums(step, {"gradient": bound})["gradient"].exact_numbers


def table_of(X, y, offsets):
    return UserTable(X.astype(np.float32), y.astype(np.float32), offsets, np.arange(len(offsets) - 1))


def moved_by_hostile(step, bound, slots):
    """How far replacing a user moves the clipped sum, at most, and the sums themselves."""
    users, strange = crowd(slots, True), strangers(*crowd(slots, True, seed=9))
    totals = [total_of(step, bound, *users)]
    totals += [total_of(step, bound, *replaced) for _, _, replaced in replacements(users, strange, (0, 2))]
    assert all(np.isfinite(total).all() for total in totals)
    return max(np.linalg.norm(total - totals[0]) for total in totals), totals


@pytest.mark.parametrize("slots", [1, 3])
def test_whoever_is_in_a_batch_its_gradient_stays_in_the_ball(slots):
    step, clip = batch_step("deep", slots), 0.02
    bound = Bound(clip, step.size, terms_per_user=1)
    moved, totals = moved_by_hostile(step, bound, slots)
    farthest = 2 * clip * (1 + BATCH_SLACK) + 2 * measure_rounding(step.size, bound.step)
    assert bound.sensitivity("replace-one-user") == farthest
    assert bound.sensitivity("add-or-remove-one-user") == farthest
    assert moved <= farthest
    assert max(np.linalg.norm(total) for total in totals) == pytest.approx(clip, rel=1e-3)  # it was clipped
    assert moved > clip / 4


def test_two_batches_that_differ_in_a_user_can_be_two_bounds_apart():
    """So a noise multiplier is relative to twice the bound: the gradient of a batch can turn round."""
    modules = [nn.Linear(DIM, DIM, bias=False) for _ in range(2)]
    for module in modules:
        nn.init.eye_(module.weight)
    found, clip = make_towers(*modules, DIM, DIM), 1e-3
    step = BatchStep(found, found.weights(1.0), Layout(DIM, DIM, np.zeros((0, DIM), np.float32)), 1.0, 1)
    bound, sums = Bound(clip, step.size, terms_per_user=1), []
    for side in (0.01, -0.01):  # the second text on this side of the first, or on that
        pairs = [[1, 1, 0, 1, 0, 0], [1, -1, 0, 1, side, 0]]
        sums.append(total_of(step, bound, np.array(pairs, np.float32)[:, None], np.zeros((2, 1))))
    assert np.linalg.norm(sums[0] - sums[1]) == pytest.approx(2 * clip, rel=0.01)


# Inside the loss


def inside_step(slots=1, users=USERS):
    found = model("linear")
    return InsideStep(found, found.weights(TEMPERATURE), Layout(IMAGE, TEXT, BANK), TEMPERATURE, slots, users)


def plain_sigmoid_gradient(step, X, y):
    image, text, log_scale = leaves(step)
    rows, targets = torch.tensor(X).flatten(0, 1), y.ravel()
    loss = torch.tensor(0.0)
    there = [place for place, target in enumerate(targets) if target in range(CAPTIONS + 1)]
    words = {p: rows[p, IMAGE:] if targets[p] == CAPTIONS else torch.tensor(BANK[int(targets[p])]) for p in there}
    for i in there:
        for j in there:
            if i != j and targets[i] == targets[j] != CAPTIONS:
                continue  # one caption of the bank
            u, v = step.towers.image(image, rows[[i], :IMAGE])[0], step.towers.text(text, words[j][None])[0]
            similarity = torch.dot(u / u.norm(), v / v.norm()) * log_scale.exp() - math.log(len(targets))
            loss = loss - functional.logsigmoid(similarity if i == j else -similarity)
    return differentiated(loss, [image, text])


@pytest.mark.parametrize("slots", [1, 3])
def test_without_clipping_it_is_the_gradient_of_the_sigmoid_loss(slots):
    step = inside_step(slots)
    X, y = crowd(slots, True)
    expected = plain_sigmoid_gradient(step, X, y)
    assert total_of(step, step.choose_bound(1e6), X, y) == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())
    assert np.abs(expected).max() > 0.1
    assert np.linalg.norm(total_of(step, step.choose_bound(1e-2), X, y)) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("slots", [1, 3])
def test_private_negatives_move_by_twice_the_bound_whatever_the_batch(slots):
    for users in (2, USERS, 100):
        found = inside_step(slots, users).choose_bound(0.7).sensitivity("replace-one-user")
        assert found == pytest.approx(1.4 * (1 + BATCH_SLACK))
    step, clip = inside_step(slots), 0.05
    moved, _ = moved_by_hostile(step, step.choose_bound(clip), slots)
    assert moved <= step.choose_bound(clip).sensitivity("replace-one-user")
    assert moved > clip / 4


def test_what_cannot_be_clipped_inside_is_refused():
    for found in (model("deep"), model("frozen texts"), model(learn_scale=True), model(cosine=False)):
        with pytest.raises(InputError, match="two trainable linear projections"):
            check_inside(found)
    first = nn.Sequential(nn.Linear(IMAGE, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
    first[0].requires_grad_(False)
    check_inside(make_towers(first, encoders("linear")[1], IMAGE, TEXT))
    other = nn.Sequential(nn.Linear(IMAGE, IMAGE, bias=False), nn.Linear(IMAGE, IMAGE, bias=False))
    other[1].requires_grad_(False)
    with pytest.raises(InputError, match="two trainable linear projections"):
        check_inside(make_towers(other, nn.Linear(TEXT, IMAGE, bias=False), IMAGE, TEXT))
    with pytest.raises(InputError, match=r"at most 2,048 pairs\. Got 2,049"):
        inside_step(users=2049)


def test_projections_of_what_is_frozen_are_clipped_inside_too():
    frozen = started(nn.Linear(IMAGE, 4), nn.Tanh()).requires_grad_(False)
    found = make_towers(
        nn.Sequential(frozen, started(nn.Linear(4, DIM, bias=False))), encoders("linear")[1], IMAGE, TEXT
    )
    step = InsideStep(found, found.weights(TEMPERATURE), Layout(IMAGE, TEXT, BANK), TEMPERATURE, 1, USERS)
    X, y = crowd(1, True)
    expected = plain_sigmoid_gradient(step, X, y)
    assert total_of(step, step.choose_bound(1e6), X, y) == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())


def test_a_layout_is_that_of_the_pairs():
    pairs = Pairs(table_of(np.zeros((2, IMAGE)), np.zeros(2), np.arange(3)), IMAGE, 0, BANK)
    found = layout_of(pairs)
    assert (found.image_numbers, found.text_numbers, found.free) == (IMAGE, 0, CAPTIONS)


def test_directions_have_length_one_and_zeros_stay():
    found = normalise_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-20, 0.0]]))
    assert found[:2].tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]
    assert torch.isfinite(found).all()

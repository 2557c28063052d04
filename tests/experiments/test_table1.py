"""The comparison of Table 1: clients, methods and rows, on images so few and so easy that all can be checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from experiments.classes import read
from experiments.table1 import Job, Row, Runner, main, means, papers_number
from experiments.table1_data import Sources, Unit, dealt, public_maps, writers
from experiments.table1_runs import (
    METHODS,
    PRIVATE,
    Alone,
    Watched,
    best_alone,
    best_of_grid,
    grid,
    network_of,
    new_run,
    paper,
    result_of,
    run_alone,
    run_default,
    run_method,
)

from experiments import table1, table1_data, table1_runs
from privrep.neural.features import Dct
from privrep.neural.methods.fedavg import fedavg

CLIENTS = 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Ten classes of 28 x 28 images: a bright bar whose place tells the class, under grain; ten writers."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "mnist").mkdir()
    rng = np.random.default_rng(72)
    for part, count in (("train", 800), ("test", 400)):
        labels = np.arange(count) % 10
        images = rng.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 3 : 2 * label + 6, 4:24] += 150
        names = rng.permutation(np.arange(count) % 10)
        np.savez(folder / "mnist" / f"{part}.npz", images=images.astype(np.uint8), labels=labels, writers=names)
    return Sources(folder, folder / "fashion", folder / "cache")


@pytest.fixture(scope="module")
def clients(sources):
    return dealt("mnist", CLIENTS, 5, 1, sources)


def quick(chosen, rounds=2):
    return replace(chosen, settings=replace(chosen.settings, rounds=rounds))


def test_clients_have_few_classes_and_are_tested_on_their_own(clients) -> None:
    assert clients.train.n_users == clients.validation.n_users == clients.test.n_users == CLIENTS
    assert clients.train.sizes.tolist() == [36] * CLIENTS
    assert clients.validation.sizes.tolist() == [4] * CLIENTS
    assert clients.test.sizes.tolist() == [table1_data.TESTED] * CLIENTS
    assert clients.image == (28, 28, 1)
    for user in range(CLIENTS):
        mine, tested = (set(np.unique(table.users(user, user + 1).y)) for table in (clients.train, clients.test))
        assert tested <= mine | set(np.unique(clients.validation.users(user, user + 1).y))
        assert len(mine) <= 5
    few = clients.first(3)
    assert (few.train.n_users, few.validation.n_users, few.test.n_users) == (3, 3, 3)


def test_public_maps_give_rows_of_length_one(clients) -> None:
    for name, public in public_maps(clients.image).items():
        mapped = clients.first(2).mapped(public)
        np.testing.assert_allclose(np.linalg.norm(mapped.train.X, axis=1), 1, rtol=1e-5, err_msg=name)
        assert mapped.image is None
    assert Unit(None, 8.0)(np.ones((1, 4), np.float32)).tolist() == [[4.0] * 4]
    np.testing.assert_array_equal(Unit(Dct(28, 28, keep=9))(np.zeros((1, 784), np.float32)), np.zeros((1, 9)))


def test_centred_rows_have_the_products_of_the_rows_less_their_clients_mean(clients) -> None:
    few = clients.first(3)
    there = few.centred()
    assert there.features == few.slots < few.features
    for user in range(3):
        train, test = (table.users(user, user + 1).X for table in (few.train, few.test))
        new, tested = (table.users(user, user + 1).X for table in (there.train, there.test))
        mean = train.mean(axis=0)
        size = ((train - mean) ** 2).sum(axis=1).mean()
        np.testing.assert_allclose(tested @ new.T, (test - mean) @ (train - mean).T / size, atol=1e-4)
        assert (new**2).sum(axis=1).mean() == pytest.approx(1, rel=1e-4)


def test_writers_keep_a_tenth_to_test_on(sources, monkeypatch) -> None:
    monkeypatch.setattr(table1_data, "MOST_ROWS", 50)
    found = writers(1, sources)
    assert found.train.sizes.tolist() == [50] * 10
    assert found.test.sizes.tolist() == [8] * 10
    for user in range(10):
        train, test = (table.users(user, user + 1).X for table in (found.train, found.test))
        assert not (train[:, None, :] == test[None]).all(axis=2).any()  # no image is in both


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_in_the_papers_configuration_and_private_ones_spend_their_budget(method, clients) -> None:
    result = run_method(method, quick(paper("mnist", "step")), clients, 1.0, 1)
    assert 0 <= result.accuracy <= 1
    assert result.clients == CLIENTS
    if method in PRIVATE:
        assert result.epsilon_spent == pytest.approx(1.0, abs=1e-6)
        assert result.rounds == 2
        shared = network_of("MLP", clients, method)
        expected = shared.representation.size + (0 if method == "CENTAUR" else shared.head.size)
        assert result.parameters == expected
        assert 0 < result.signal_to_noise < 0.1  # twenty clients cannot carry 235,000 numbers
    else:
        assert result.epsilon_spent is None
    if method == "stand-alone":
        assert result.accuracy > 0.8  # the images are easy


def test_ratio_is_that_of_the_exact_clipped_sum_to_the_noise(clients) -> None:
    chosen = quick(paper("mnist", "step"), rounds=1)
    result = run_method("DP-FedAvg-ft", chosen, clients, 1.0, 1)
    network = network_of("MLP", clients, "DP-FedAvg-ft")
    run = new_run(clients.train, 1.0, 1, "DP-FedAvg-ft")
    fedavg(run, network, chosen.settings, run.ledger.capacity, clients.slots)
    released = run.billboard.releases("fedavg-1")["update"]
    noise = released.sigma * np.sqrt(len(released.value))
    assert isinstance(run.users, Watched)
    (length,) = run.users.lengths
    assert result.signal_to_noise == pytest.approx(length / noise, rel=1e-6)
    assert 0 < length <= CLIENTS * chosen.settings.clip
    exact = np.linalg.norm(released.value) ** 2
    assert exact == pytest.approx(noise**2, rel=0.05)  # what was released is noise: 235,000 numbers, alarm << 1e-6


def test_linear_layer_of_the_grid_is_small_and_learns_without_noise_to_speak_of(clients) -> None:
    (best,) = [
        c for c in grid("mnist", ("linear",))
        if (c.settings.clip, c.settings.step_size, c.settings.server_rate) == (0.25, 0.1, 4.0)
    ]  # fmt: skip
    result = run_method("DP-FedAvg-ft", best, clients, 1e4, 1)
    assert result.parameters == 2570
    assert result.accuracy > 0.5


def test_grid_is_the_stated_one() -> None:
    found = grid("fashion-mnist")
    assert len({c.words for c in found}) == len(found) == 9
    assert {(c.network, c.settings.rounds) for c in found} == {("MLP", 40), ("linear", 16)}
    assert {c.settings.clip for c in found} == {0.05, 0.25}
    assert {c.network for c in grid("cifar10 features")} == {"small MLP", "linear"}


def test_choices_are_made_on_validation_images(clients, monkeypatch) -> None:
    asked = []

    def run(method, chosen, there, epsilon, seed, tested):
        asked.append(tested)
        right = (chosen.network, chosen.settings.clip, chosen.settings.server_rate) == ("linear", 0.05, 4.0)
        return result_of(np.full(4, 0.9 if right else 0.2))

    monkeypatch.setattr(table1_runs, "run_method", run)
    chosen = best_of_grid("PPSGD", "mnist", clients, 1.0, 0, say=lambda line: None)
    assert (chosen.network, chosen.settings.clip, chosen.settings.server_rate) == ("linear", 0.05, 4.0)
    assert set(asked) == {"validation"}
    best = Alone("logistic", "DCT 99", 1e-3)
    monkeypatch.setattr(table1_runs, "run_alone", lambda way, *rest: result_of(np.full(4, 0.8 if way == best else 0.7)))
    assert best_alone("mnist", clients, 0, say=lambda line: None) == best


def test_logistic_regression_alone_learns_easy_images(clients) -> None:
    few = clients.first(5)
    result = run_alone(Alone("logistic", "pixels", 1e-3), few, 1)
    assert result.accuracy > 0.95
    assert result.clients == 5


def test_defaults_run_and_are_no_worse_than_alone(clients) -> None:
    result = run_default(clients, 1.0, 1)
    assert result.epsilon_spent is not None
    assert result.epsilon_spent <= 1 + 1e-9
    alone = run_default(clients, 1.0, 1, share="nothing")
    assert result.accuracy > alone.accuracy - 0.05
    assert alone.accuracy > 0.8


def test_numbers_of_the_paper_are_those_of_the_nearest_setting() -> None:
    assert papers_number("mnist", 500, "CENTAUR") == 94.17
    assert papers_number("fashion-mnist", 2_000, "PPSGD") == 88.96
    assert papers_number("mnist", 5_000, "PMTL-ft") == 88.81
    assert papers_number("cifar10 features", 500, "stand-alone") == 50.03
    assert papers_number("mnist by writer", 539, "CENTAUR") is None
    assert papers_number("mnist", 500, "FedRep") is None


def test_rows_are_written_one_by_one_and_not_run_again(sources, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(table1, "TABLE", (("mnist", CLIENTS),))
    monkeypatch.setattr(table1, "paper", lambda dataset, local: quick(paper(dataset, local), 1))
    options = ["--data", str(sources.data), "--results", str(tmp_path), "--seeds", "1"]
    main([*options, "--only", "PPSGD", "stand-alone"])
    rows = read(tmp_path / "table1.csv", Row)
    assert [row.method for row in rows] == ["stand-alone", "PPSGD"]
    assert [row.noise for row in rows] == ["none", "simulated"]
    assert [row.paper for row in rows] == [93.47, 93.44]
    assert rows[1].job == Job("mnist", CLIENTS, "PPSGD", "paper", "step", 1.0, 1)
    assert (tmp_path / "table1.png").stat().st_size > 10_000
    ran = []
    real = Runner.__call__
    monkeypatch.setattr(Runner, "__call__", lambda self, job: (ran.append(job), real(self, job))[1])
    main([*options, "--only", "PPSGD", "stand-alone", "CENTAUR"])
    assert [job.method for job in ran] == ["CENTAUR"]
    again = read(tmp_path / "table1.csv", Row)
    assert again[:2] == rows
    assert len(means(again)) == 3
    capsys.readouterr()
    main([*options, "--list"])
    assert capsys.readouterr().out.count("Job(") == 4  # three methods that are left, and the defaults


def test_jobs_are_all_different(monkeypatch) -> None:
    for jobs in (
        list(table1.jobs_of_table(3, "step")),
        list(table1.jobs_of_targets(3)),
        list(table1.jobs_of_figure(3, "step")),
        list(table1.jobs_of_writers(3, "epoch")),
    ):
        assert len(set(jobs)) == len(jobs) > 0
        assert all(job.seed != table1.CHOOSING for job in jobs)


def test_features_of_other_images_are_refused(sources, monkeypatch) -> None:
    train, test = table1_data.images_of("mnist", sources)
    monkeypatch.setattr(table1_data, "images_of", lambda dataset, there: (train, test))
    monkeypatch.setattr(
        table1_data, "efficientnet_features", lambda pixels, side: np.ones((len(pixels), 6), np.float32)
    )
    table1_data.encoded.cache_clear()
    assert table1_data.encoded("train", sources).shape == (800, 6)
    assert dealt("cifar10 features", CLIENTS, 5, 1, sources).features == 6
    table1_data.encoded.cache_clear()
    other = replace(train, labels=train.labels[::-1].copy())
    monkeypatch.setattr(table1_data, "images_of", lambda dataset, there: (other, test))
    with pytest.raises(SystemExit, match="other images"):
        table1_data.encoded("train", sources)
    table1_data.encoded.cache_clear()

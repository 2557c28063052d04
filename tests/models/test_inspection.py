"""What people read about a folder of tables: its words, its numbers, and what is said where it is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from privrep import PrivateFedRep
from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.estimators.ratings import PrivateFactorization
from privrep.heads.fitting import fit_heads
from privrep.linear.registry import METHODS
from privrep.models import model as models
from privrep.models import spending
from privrep.models.description import Columns, Config
from privrep.models.inspection import inspect_folder
from privrep.models.learning import learn
from privrep.models.picture import _find_bars
from privrep.models.sections import Inspection
from privrep.models.verification import verify
from privrep.privacy.events import Event, Gaussian, Relation, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.report import PrivacyReport
from privrep.users.memory import InMemoryUsers


def make_model(folder: Path, **options: object) -> models.Model:
    rng = np.random.default_rng(0)
    table = make_population(rng, 400, 6, 2, 6, 0.1).sample(rng)
    settings = {"rank": 2, "epsilon": 4.0, "delta": 1e-6, **options}
    config = Config(**settings)  # type: ignore[arg-type]
    fitted = learn(InMemoryUsers(table), config, folder=folder)
    fitted = models.with_heads(fitted, fit_heads(table.blocks(), fitted.representation))
    models.finish(fitted, folder)
    return fitted


def everything(found: Inspection) -> str:
    return "\n".join([heading + "\n" + "\n".join(lines) for heading, lines in found.words.items()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "model"
    make_model(path)
    return path


def test_words_state_what_a_reviewer_asks_for(folder: Path) -> None:
    text = everything(inspect_folder(folder))
    for said in (
        "replace-one-user",
        "epsilon 4",
        ", 1e-06)-differential",
        "Gaussian differential privacy",
        "cryptographic",
    ):
        assert said in text
    for unprotected in ("heads", "Membership", "number of users", "Metrics", "Side channels", "Other fits"):
        assert unprotected in text
    assert "SEEDED" not in text
    assert "heads of 400 users" in text


def test_a_seeded_run_says_so_loudly(tmp_path: Path) -> None:
    make_model(tmp_path / "m", seed=3)
    text = everything(inspect_folder(tmp_path / "m"))
    assert "NOT PRIVATE" in text
    assert "Nothing, because the noise was seeded" in text
    assert inspect_folder(tmp_path / "m").to_json()["private"] is False


def test_the_other_relation_protects_membership(tmp_path: Path) -> None:
    make_model(tmp_path / "m", relation="add-or-remove-one-user")
    found = inspect_folder(tmp_path / "m")
    assert "took part at all is protected" in everything(found)
    assert not any("Membership" in line for line in found.words["What is not protected"])


def test_shares_add_up_to_what_was_spent(folder: Path) -> None:
    found = inspect_folder(folder)
    assert sum(one.share for one in found.releases) == pytest.approx(found.share_spent, rel=1e-6)
    assert found.share_spent == pytest.approx(1 - found.privacy.unspent, rel=1e-6)
    assert 0.5 < found.share_spent <= 1 + 1e-9
    assert without_purpose(found) == []


def without_purpose(found: Inspection) -> list[str]:
    return [one.name for one in found.releases if not one.purpose]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options", [{}, {"configuration": "paper", "intercept": False, "safety_net": False}], ids=["default", "paper"]
)
def test_every_release_of_every_method_has_a_purpose(method: str, options: dict[str, object], tmp_path: Path) -> None:
    make_model(tmp_path / "m", method=method, seed=1, **options)
    found = inspect_folder(tmp_path / "m")
    assert without_purpose(found) == []
    left = 1 - spending.find_share_spent(found.privacy)
    assert left == pytest.approx(0.0, abs=1e-6) or (not options and left < 0.5)  # papers spend all
    text = everything(found)
    assert ("It stopped early" in text) == (left > 0.02)
    assert method in text
    assert ("configuration of its paper" in text) == bool(options)
    assert ("Features as they come" in text) == bool(options)


@pytest.mark.parametrize("start", ["spectral", "normalised-pairs", "power-method", "random"])
def test_every_release_of_every_start_has_a_purpose(start: str, tmp_path: Path) -> None:
    make_model(tmp_path / "m", start=start, seed=1)
    found = inspect_folder(tmp_path / "m")
    assert without_purpose(found) == []
    assert f"Start: {start}" in everything(found)


@pytest.mark.parametrize("relation", ["replace-one-user", "add-or-remove-one-user"])
def test_every_release_of_a_default_fit_of_a_panel_has_a_purpose(relation: Relation, tmp_path: Path) -> None:
    """Levels that lie far from zero, common slopes, an automatic rank: pages that few of the others ask for."""
    rng = np.random.default_rng(0)
    made = make_population(rng, 3000, 5, 1, 6, 1.0, level=100.0, intercept=1.0, common=1.0, between=1.0, context=1.0)
    fitted = learn(InMemoryUsers(made.sample(rng)), Config(None, 4.0, 1e-6, relation, seed=1))
    report = spending.list_releases(fitted.privacy)
    assert [one.name for one in report if not one.purpose] == []
    assert len(report) > 10


def test_words_about_heads_of_a_fit(tmp_path: Path) -> None:
    """A population whose users differ in level alone has a gain and no directions; one that is too small, nothing."""
    rng = np.random.default_rng(0)
    made = make_population(rng, 4000, 4, 0, 5, 1.0, level=5.0, intercept=0.5, common=2.0)
    fit_panel(made.sample(rng), tmp_path / "levels", epsilon=3.0)
    found = inspect_folder(tmp_path / "levels")
    said = "\n".join(found.words["The heads"])
    assert "smaller (within" in said
    assert "Common slopes, shrunk by their noise" in said
    heads = json.loads(json.dumps(found.to_json()))["heads"]
    assert heads["learned"] is True
    assert 0.5 < heads["smaller_than_mean"] < 0.95
    assert heads["smaller_than_alone"] > 0.1
    few = make_population(rng, 60, 4, 0, 5, 1.0, level=5.0, intercept=0.5, common=2.0)
    fit_panel(few.sample(rng), tmp_path / "few", epsilon=0.1)
    found = inspect_folder(tmp_path / "few")
    assert "Nothing is gained for sure" in "\n".join(found.words["The heads"])
    assert ("It stopped early" in everything(found)) == (found.share_spent < 0.98)
    assert found.to_json()["heads"]["learned"] is False


def fit_panel(table: UserTable, folder: Path, epsilon: float) -> None:
    fitted = learn(InMemoryUsers(table), Config(None, epsilon, 1e-6, seed=1), folder=folder)
    fitted = models.with_heads(fitted, fit_heads(table.blocks(), fitted.representation))
    models.finish(fitted, folder)


def test_names_of_releases_that_few_runs_have() -> None:
    """Deflation, sparse features, several copies, ratings of very many items."""
    for name in (
        "frequencies/frequencies",
        "keys-2/keys",
        "residuals/moments",
        "strong-scout/sizes",
        "strong-1/step",
        "strong-2/normal",
        "strong-2/right",
        "strong-3/sizes",
        "power-2-3/image",
        "taste/taste",
        "means/means",
        "tail/image",
        "presence/items",
        "offsets-5/pull",
        "taste-1/together",
        "taste-2/pairs",
    ):
        assert spending.find_purpose(name), name
    assert spending.find_purpose("unheard/of") == ""
    assert spending.find_purpose("moments/moments") == "starting point"
    assert spending.find_purpose("residuals/moments") != "starting point"


def report_of(events: dict[str, Event], epsilon: float = 1.0, delta: float = 1e-6) -> PrivacyReport:
    ledger = Ledger(Budget(epsilon, delta))
    ledger.charge(events)
    return ledger.report()


def test_groups_are_asked_in_parallel() -> None:
    """Two groups of half of the budget each, and a release to all for the other half: all is spent, not 150%."""
    half = noise_multiplier(Budget(1.0, 1e-6).mu ** 2 / 2)
    groups = {f"round-{t + 1}/step": Gaussian(half, Group("rounds", t, 2)) for t in range(2)}
    report = report_of({"moments/moments": Gaussian(half), **groups})
    spent = spending.list_releases(report)
    assert [one.share for one in spent] == pytest.approx([0.5, 0.5, 0.5])
    assert [one.remark for one in spent] == ["", "group 1 of 2", "group 2 of 2"]
    assert spending.find_share_spent(report) == pytest.approx(1.0)
    assert _find_bars(report) == pytest.approx(
        {"starting point": 0.5, "round 1 (group 1 of 2)": 0.5, "round 2 (group 2 of 2)": 0.5}
    )


def test_what_a_selection_sets_aside_is_said() -> None:
    """Shares are of what is left to spend once a part of delta is set aside, so that they still end at 100%."""
    budget = Budget(1.0, 1e-6)
    selection = Selection(noise_multiplier(0.05 * budget.mu**2), 4e-7)
    ledger = Ledger(budget)
    ledger.charge({"keys-1/keys": selection})
    ledger.charge({"taste/taste": Gaussian(noise_multiplier(ledger.remaining))})
    report = ledger.report()
    first, second = spending.list_releases(report)
    assert first.remark == "4e-07 of delta"
    assert first.share > 0.05  # of a smaller whole
    assert first.share + second.share == pytest.approx(1.0, rel=1e-9)
    assert spending.find_share_spent(report) == pytest.approx(1.0, rel=1e-9)
    assert report.epsilon == pytest.approx(1.0, rel=1e-6)
    assert _find_bars(report)["which values may be named"] == first.share


def make_ratings(folder: Path, **options: object) -> None:
    rng = np.random.default_rng(0)
    users, items = np.repeat(np.arange(800), 6), rng.integers(0, 10, 4800)
    values = rng.normal(size=10)[items] + rng.normal(size=10)[items] * rng.normal(size=800)[users]
    PrivateFactorization(1, epsilon=4.0, run_folder=folder, **options).fit(users, items, values)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::privrep.errors.FittedAgain")
def test_words_about_ratings(tmp_path: Path) -> None:
    make_ratings(tmp_path / "m")
    found = inspect_folder(tmp_path / "m")
    text = everything(found)
    for said in ("factorisation of ratings", "item (10)", "selected privately", "10 items", "spread of ratings"):
        assert said in text
    assert "declared" not in text
    assert "whitening" not in text
    assert [one.remark for one in found.releases] == ["5e-08 of delta", *[""] * (len(found.releases) - 1)]
    for said in ("users' levels lie around it", "Items' offsets", "A newcomer without rows gets the level"):
        assert said in text
    assert found.to_json()["heads"]["factors"] == found.to_json()["representation"]["rank"]
    make_ratings(tmp_path / "declared", items=list(range(12)))
    text = everything(inspect_folder(tmp_path / "declared"))
    assert "The declared list of items" in text
    assert "they were declared" in text
    data = json.loads(json.dumps(inspect_folder(tmp_path / "declared").to_json()))
    assert data["config"]["ratings"] is True
    assert data["columns"]["categories"] == [list(range(12))]


def test_words_about_coordinates(tmp_path: Path) -> None:
    """The features are uncorrelated. A declared covariance is used whatever they are, and is no one's secret."""
    make_model(tmp_path / "plain", seed=1)
    text = everything(inspect_folder(tmp_path / "plain"))
    assert "found by a charged release" in text
    assert "small or within noise" in text
    covariance = np.eye(6) + 0.9 * (np.ones((6, 6)) - np.eye(6))
    make_model(tmp_path / "m", covariance=tuple(map(tuple, covariance.tolist())))
    text = everything(inspect_folder(tmp_path / "m"))
    assert "(whitening) by the declared covariance" in text
    assert "Feature scales from 1 to 1, declared as public" in text
    assert "The declared covariance: it was taken as a public fact" in text


def test_json_holds_numbers_and_words(folder: Path) -> None:
    data = json.loads(json.dumps(inspect_folder(folder).to_json()))
    assert data["finished"] is True
    assert 3 < data["epsilon"] <= 4.0
    assert data["representation"]["rank"] == 2
    assert len(data["representation"]["scale"]) == 6
    assert data["events"][0]["name"].startswith("scales/")
    assert data["heads"]["family"]
    assert "What is not protected" in data["words"]


def test_an_unfinished_run_is_read_and_left_alone(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    config, columns = Config(2, 4.0, 1e-6), Columns()

    class Killed(Exception):
        pass

    def stop(page: str, epsilon: float) -> None:
        if page == "moments":
            raise Killed

    rng = np.random.default_rng(0)
    users = InMemoryUsers(make_population(rng, 400, 6, 2, 6, 0.1).sample(rng))
    with pytest.raises(Killed):
        learn(users, config, folder=run, columns=columns, on_page=stop)
    half_written = run / "billboard" / "0003-round-scout.tmp"
    half_written.write_bytes(b"of a process that is still at work")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = inspect_folder(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not found.finished
    names = [spent.name for spent in found.releases]
    assert (names[0].partition("/")[0], names[-1]) == ("scales", "moments/moments")
    assert not any(name.startswith("round") for name in names)
    assert 0 < found.privacy.epsilon < 4
    assert "not finished" in everything(found)
    for lose in ((run / "ledger.jsonl").unlink, (run / "ledger.jsonl").touch):  # pages stand, so something was spent
        lose()
        with pytest.raises(InputError, match=r"ledger\.jsonl"):
            inspect_folder(run)
        assert [finding.name for finding in verify(run).findings if not finding.good] == ["ledger"]
    shutil.rmtree(run / "billboard")
    assert inspect_folder(run).privacy.epsilon == 0
    assert verify(run).good


def test_folders_that_are_no_model_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        inspect_folder(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"no model\.json"):
        inspect_folder(tmp_path)
    (tmp_path / "model.json").write_text((folder / "model.json").read_text())
    with pytest.raises(InputError, match="billboard"):
        inspect_folder(tmp_path)
    assert not (tmp_path / "billboard").exists()


DAMAGE: dict[str, tuple[str, bytes | None]] = {
    "model.json, no config": ("model.json", b'{"format": "privrep-model/2"}'),
    "model.json, of another version": ("model.json", b'{"format": "privrep-model/1"}'),
    "billboard, no representation": ("billboard/*-representation.safetensors", None),
    "ledger, its budget": ("ledger.jsonl", b'{"format": "privrep-ledger/1"}\n'),
    "heads, empty": ("private/heads.parquet", b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_sentence_however_it_is_read(damage: str, tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    pattern, content = DAMAGE[damage]
    (path,) = broken.glob(pattern)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for read in (models.load, PrivateFedRep.load, inspect_folder):
        with pytest.raises(InputError) as caught:
            read(broken)
        message = str(caught.value)
        assert str(broken) in message
        assert pattern.partition("/")[0] in message
        assert message.count("\n") == 0


def test_heads_of_another_model_are_refused(tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    make_model(tmp_path / "other", rank=1)
    shutil.copy(tmp_path / "other" / "private" / "heads.parquet", broken / "private" / "heads.parquet")
    with pytest.raises(InputError, match="heads are of another representation"):
        models.load(broken)


def test_five_lines_say_the_most(folder: Path, tmp_path: Path) -> None:
    found = inspect_folder(folder)
    said = found.summary
    assert list(said) == ["guarantee", "spent", "shared", "sizes", "simulation"]
    assert (
        said["guarantee"]
        == f"({found.privacy.epsilon:.4g}, 1e-06)-differential privacy for each user, replace-one-user"
    )
    assert said["spent"].startswith(f"epsilon {found.privacy.epsilon:.4g} of 4: ")
    assert "% of mu², in " in said["spent"]
    assert said["shared"] == "a representation of rank 2, and the prior of heads"
    assert said["sizes"] == "heads of 400 users in private/; 6 features"
    assert said["simulation"] == "no: secret noise"
    assert found.to_json()["summary"] == said
    make_model(tmp_path / "seeded", seed=1)
    seeded = inspect_folder(tmp_path / "seeded").summary
    assert seeded["guarantee"].startswith("none: with secret noise, (")
    assert seeded["simulation"] == "YES: seeded noise, NOT PRIVATE"

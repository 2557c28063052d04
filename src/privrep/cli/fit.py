"""`privrep fit`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privrep.cli.shared import TablePath, check_relation, note, progress, say, shout, split_names
from privrep.errors import InputError, ResumeError

if TYPE_CHECKING:
    from privrep.data.readers import TableSource
    from privrep.heads import Heads
    from privrep.model import Columns, Config, Model
    from privrep.report.words import Inspection

_NOT_PRIVATE = "(not private: for your eyes)"


def fit(
    table: TablePath,
    user: Annotated[str, typer.Option(help="Column that names the user of each row.")],
    target: Annotated[str, typer.Option(help="Column to predict.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget, whole fit. Smaller is more private.")],
    delta: Annotated[float, typer.Option(help="Privacy budget, second part; well below 1 / number of users.")],
    out: Annotated[Path, typer.Option(help="Folder of the model. The same command continues a stopped fit.")],
    features: Annotated[
        str | None, typer.Option(help="Columns A,B,C; if left out all others (of Parquet: all others of numbers).")
    ] = None,
    rank: Annotated[str, typer.Option(metavar="K|auto", help="Columns of the representation.")] = "auto",
    relation: Annotated[
        str, typer.Option(help="replace-one-user, or add-or-remove-one-user.", metavar="RELATION")
    ] = "replace-one-user",
    no_intercept: Annotated[bool, typer.Option("--no-intercept", help="Users have no intercepts.")] = False,
    no_safety_net: Annotated[
        bool, typer.Option("--no-safety-net", help="Every user uses the shared representation, helpful or not.")
    ] = False,
    scale: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON file of public feature sizes: {"column": size, ...}.')
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="default|paper", help="paper: as published; needs --rank K and --no-intercept.")
    ] = "default",
    simulate: Annotated[
        int | None, typer.Option(metavar="SEED", help="Seeded noise: repeatable and NOT PRIVATE. For experiments.")
    ] = None,
    user_as_text: Annotated[
        bool, typer.Option("--user-as-text", help="CSV: ids that look like numbers are text (keeps leading zeros).")
    ] = False,
    workdir: Annotated[Path | None, typer.Option(help="Folder for temporary files; the system's if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model or another run in --out.")] = False,
) -> None:
    """Learn a shared representation privately, and every user's head, from a table of (user, features, target)."""
    from privrep.data.readers import TableSource
    from privrep.model import Columns, Config

    _check_out(out, overwrite)
    source = TableSource(table, user, target, split_names(features), user_as_text)
    config = Config(
        rank=_rank(rank),
        epsilon=epsilon,
        delta=delta,
        relation=check_relation(relation),
        intercept=not no_intercept,
        safety_net=not no_safety_net,
        scale=_scale(scale, source.feature_names),
        seed=_seed(simulate),
        method=method,
    )
    _check(config, source)
    if features is None:
        _list_left_out(source)
    columns = Columns(user, target, source.feature_names)
    _standing(out, config, columns, overwrite)
    _summarise(_learn(source, config, columns, out, workdir, overwrite), out)


def _rank(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--rank must be a positive integer or auto. Got {text!r} instead.") from None


def _seed(number: int | None) -> int | None:
    if number is not None and number < 0:
        raise InputError(f"--simulate must be zero or a positive integer. Got {number} instead.")
    return number


def _scale(path: Path | None, features: tuple[str, ...]) -> tuple[float, ...] | None:
    if path is None:
        return None
    try:
        sizes = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"--scale: {path} is not JSON ({error}).") from None
    if not isinstance(sizes, dict):
        raise InputError(f'--scale: {path} must hold {{"column": size, ...}}.')
    for name in features:
        size = sizes.get(name)
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise InputError(f"--scale: {path} gives no positive number for feature {name!r}.")
    return tuple(float(sizes[name]) for name in features)


def _check(config: Config, source: TableSource) -> None:
    """Refuse settings that cannot work, before anything is written."""
    config.check(len(source.feature_names))


def _list_left_out(source: TableSource) -> None:
    left_out = [name for name in source.header if name not in source.columns]
    if left_out:
        listed = ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else "")
        note(f"Not numbers, so not features: {listed}. Name the features with --features to be sure.")


def _learn(
    source: TableSource, config: Config, columns: Columns, out: Path, workdir: Path | None, overwrite: bool
) -> Model:
    """The representation, then the heads, all of it written to the folder `out`."""
    from privrep import model as models
    from privrep.engines.streaming import StreamingUsers
    from privrep.heads import fit_heads
    from privrep.privacy.bounds import MAX_USERS

    with _stoppable(out):
        with progress(out) as bar, StreamingUsers.open(source, workdir) as users:
            if users.count > MAX_USERS:
                raise InputError(f"{source.path} has {users.count:,} users; one fit takes at most {MAX_USERS:,}.")
            if config.relation == "replace-one-user" and config.delta * users.count >= 1:
                note(f"delta {config.delta:g} is a weak promise to {users.count:,} users: keep it far below 1 in them.")
            _make_room(out, config, columns, overwrite)
            fitted = models.learn(users, config, folder=out, columns=columns, on_page=bar.page)
            blocks = bar.heads(users.blocks(), users.count)
            heads = fit_heads(blocks, fitted.representation, intercept=config.intercept, safety_net=config.safety_net)
        fitted = models.with_heads(fitted, heads)
        models.finish(fitted, out)
    return fitted


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Ctrl-C ends with a word on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{out} keeps what was done: run the same command to continue; nothing is spent twice."
        after = kept if (out / "run.json").is_file() else "nothing was written."
        print(f"privrep: stopped; {after}", file=sys.stderr)
        raise typer.Exit(130) from None


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be the model's, before anything is read."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out: {out} is a file; name a folder.")
    if (out / "model.json").is_file():
        if not overwrite:
            raise InputError(f"--out: {out} holds a finished model; choose another folder, or pass --overwrite.")
    elif not (out / "run.json").is_file() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty and holds no run of privrep; choose another folder.")


def _standing(out: Path, config: Config, columns: Columns, overwrite: bool) -> Inspection | None:
    """What is in the folder `out`; an error if this fit can neither continue nor replace it."""
    from privrep.report.words import inspect_folder

    _check_out(out, overwrite)
    if not out.exists() or not any(out.iterdir()):
        return None
    found = inspect_folder(out)
    if not (found.finished or overwrite or _same_run(found, config, columns)):
        raise ResumeError(
            f"{out} holds a run with other settings or columns; continue it with the same options, choose another "
            "--out, or pass --overwrite to drop it."
        )
    return found


def _same_run(found: Inspection, config: Config, columns: Columns) -> bool:
    return not found.finished and (found.config, found.columns) == (config, columns)


def _make_room(out: Path, config: Config, columns: Columns, overwrite: bool) -> None:
    """Say that a run is continued, or remove what --overwrite replaces: a model, or a run with other settings."""
    found = _standing(out, config, columns, overwrite)
    if found is None:
        return
    spent = f"epsilon {found.privacy.epsilon:.4g} at delta {found.privacy.delta:g}"
    if _same_run(found, config, columns):
        note(f"Continuing the run in {out}; {spent} was spent before.")
        return
    with _sole_owner(out / "ledger.jsonl"):
        shutil.rmtree(out)
    note(f"Replaced {out}. It had spent {spent}: for users who are in both, the two fits add up.")


@contextmanager
def _sole_owner(ledger: Path) -> Iterator[None]:
    """Refuse to touch a run that another process is working on."""
    import fcntl

    if not ledger.is_file():
        yield
        return
    with open(ledger, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{ledger.parent} is in use by another process; wait for it, or choose another --out."
            ) from None
        yield


def _summarise(fitted: Model, out: Path) -> None:
    report, (features, rank) = fitted.privacy, fitted.representation.basis.shape
    assert fitted.heads is not None
    say(f"Model: {out}")
    say(
        f"Privacy: epsilon {report.epsilon:.4g} of {report.epsilon_budget:g} spent, delta {report.delta:g}, "
        f"user level, {report.relation}"
    )
    label = "" if report.relation == "replace-one-user" else f" {_NOT_PRIVATE}"  # else their number is no public fact
    say(f"Users: {len(fitted.heads.ids):,}{label}; rank {rank} of {features} features")
    say(_kinds(fitted.heads))
    if fitted.representation.mostly_noise:
        shout("NOTHING WAS LEARNED: the representation is mostly noise. It takes more users or a larger epsilon.")
    if report.seeded:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        say(f"All of {out} but {out / 'private'} may be published; the heads in there belong to their users.")
    say(f"Predict with: privrep predict {out} TABLE --out FILE     What it means: privrep inspect {out}")


def _kinds(heads: Heads) -> str:
    """How many users use which kind of head. Computed on users' data: for the owner's eyes."""
    counts = [int((heads.kind == kind).sum()) for kind in range(3)]
    return (
        f"Heads: {counts[0]:,} on the shared representation, {counts[1]:,} a regression of their own, {counts[2]:,} a "
        f"constant {_NOT_PRIVATE}"
    )

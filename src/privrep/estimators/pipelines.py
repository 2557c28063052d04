"""A remark on pipelines: a step that learned from users' rows before the fit spent what no ledger counts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from sklearn.compose import ColumnTransformer
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.utils import get_tags

from privrep.errors import OutsideLedger

MOST_FRAMES = 40  # between a pipeline's fit and its last step's


def remark_on_pipeline(estimator: Any, stacklevel: int = 3) -> None:
    """Warn once where a pipeline calls this estimator's fit after fitting other steps on the same rows.

    Args:
        estimator: whose `fit` is running.
        stacklevel: how many calls above this one the warning points to.
    """
    pipeline = _find_pipeline(estimator)
    if pipeline is None:
        return
    found = [f"{name!r} ({kind})" for name, kind in _list_fitted(pipeline.steps[:-1])]
    if found:
        warnings.warn(
            f"step {', '.join(found)} of the pipeline learned from these users' rows before this fit, and no ledger "
            "counts it. Leave it out: features are scaled and filled inside, by released numbers. Or fit it on public "
            "rows, and freeze it (sklearn.frozen.FrozenEstimator).",
            OutsideLedger,
            stacklevel=stacklevel,
        )


def _find_pipeline(estimator: Any) -> Pipeline | None:
    """Return the pipeline whose `fit` is running, and whose last step is this estimator; None if there is none."""
    frame: Any = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        caller = frame.f_locals.get("self")
        if isinstance(caller, Pipeline) and frame.f_code.co_name.startswith("fit") and caller.steps[-1][1] is estimator:
            return caller
        frame = frame.f_back
    return None


def _list_fitted(steps: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the class of each step that learns from rows, those within other steps included."""
    for name, step, *_ in steps:
        inner = _list_inner(step)
        if inner is not None:
            yield from ((f"{name}__{part}", kind) for part, kind in _list_fitted(inner))
        elif _learns(step):
            yield name, type(step).__name__


def _list_inner(step: Any) -> Any:
    """Return the steps that a step is made of; None if it is made of none."""
    if isinstance(step, Pipeline):
        return step.steps
    if isinstance(step, FeatureUnion):
        return step.transformer_list
    return step.transformers if isinstance(step, ColumnTransformer) else None


def _learns(step: Any) -> bool:
    """Return whether a step learns from the rows that it is fitted on."""
    if step is None or isinstance(step, str | FrozenEstimator):
        return False
    if isinstance(getattr(step, "categories", None), list | tuple):
        return False  # declared ones
    try:
        return bool(get_tags(step).requires_fit)
    except Exception:  # a step of somebody else's, which says nothing of itself
        return True

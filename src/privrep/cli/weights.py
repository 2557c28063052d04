"""Heads as a file of weights, which predicts without privrep."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from privrep.cli.streams import new_file

if TYPE_CHECKING:
    from privrep.heads.heads import Heads
    from privrep.models.model import Model


class ColumnNames(NamedTuple):
    """The names of the columns of a table."""

    features: Sequence[str]
    targets: Sequence[str]


def write_weights(heads: Heads, fitted: Model, names: ColumnNames, out: Path) -> None:
    """Write every user's linear model in the original features: prediction = intercept + sum of weight * feature.

    There is one for each target, named where there are several, or for each class. Of two classes it is for the second,
    which is predicted where it is positive. The feature `item=A` is 1 in rows of item A and 0 in others.

    Args:
        heads: of the users.
        fitted: the model.
        names: of features and targets.
        out: the file, whose ending says how it is written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from privrep.heads.fitting import HEAD_KINDS

    weights, features = heads.weights(fitted.representation), names.features
    targets: dict[str, list[Any]] = {}
    if fitted.columns.classes:
        targets["class"] = list(fitted.columns.classes[-heads.targets :]) * len(heads.ids)
    elif heads.targets > 1:
        targets["target"] = list(names.targets) * len(heads.ids)
    table = {
        "user": heads.ids.repeat(heads.targets).tolist(),
        **targets,
        "kind": [HEAD_KINDS[kind] for kind in heads.kind],
        "intercept": heads.intercept.tolist(),
    }
    columns = {**table, **{f"weight_{name}": weights[:, j].tolist() for j, name in enumerate(features)}}
    with new_file(out) as temporary:
        if out.suffix.lower() == ".parquet":
            pq.write_table(pa.table(columns), temporary)
        elif out.suffix.lower() == ".csv":
            with open(temporary, "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([list(columns), *zip(*columns.values(), strict=True)])
        else:
            people = [
                {**dict(zip(table, person, strict=True)), "weights": dict(zip(features, line, strict=True))}
                for *person, line in zip(*table.values(), weights.tolist(), strict=True)
            ]
            data = {**_how(fitted), "heads": people}
            temporary.write_text(json.dumps(data, indent=1))


def _how(fitted: Model) -> dict[str, Any]:
    """Return how to predict with a file of weights."""
    output, classes = "intercept + sum of weight * feature", fitted.columns.classes
    if not classes:
        return {"prediction": output}
    rule = f"the class whose {output} is largest"
    if len(classes) == 2:
        rule = f"the second class where {output} is positive, else the first"
    return {"prediction": rule, "classes": list(classes)}

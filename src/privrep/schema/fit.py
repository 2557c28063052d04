"""The configuration of `privrep fit`, which takes the same as options."""

from __future__ import annotations

from typing import Annotated, Any

from privrep.schema.machinery import Configuration, InputPath, Section, Shown, Table, Text, Texts, YesNo, entry
from privrep.schema.sections import Output, RelationBudget, TableColumns, TableModel


class TableFile(Section):
    """The table."""

    table: InputPath = entry("A Parquet or CSV file, relative to this file.", example="rows.parquet")
    user_as_text: YesNo = entry("CSV: ids that look like numbers are text (keeps leading zeros).", False)


class FitColumns(TableColumns):
    """Names of the columns of the table. Without features, all other columns of numbers are features."""

    features: Annotated[Texts | None, Shown()] = entry(
        "Columns of numbers; if left out all others (of Parquet: all others of numbers).",
        None,
        example=["x0", "x1", "x2"],
    )
    categorical: Texts | None = entry(
        "Columns of text or integers, a feature for each value; values that categories does not list are selected "
        "privately. If left out, those that categories lists.",
        None,
        example=["colour"],
    )
    item: Text | None = entry(
        "Ratings: column that names the item of each row; the target is the rating.", None, example="item"
    )
    items: Any = entry("Ratings: the list of all items, if public; else selected privately.", None, example=["a", "b"])


class FitModel(TableModel):
    """What is learned."""

    classes: Any = entry("Classification: the public classes; else selected privately.", None, example=["no", "yes"])
    covariance: Table | None = entry(
        "Public covariance of the features, in place of scale.",
        None,
        example={"columns": ["x0", "x1"], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
    )


class FitConfig(Configuration):
    """Learn a shared representation privately, and every user's head, from a table."""

    data: TableFile = entry("The table.")
    columns: FitColumns = entry("Its columns.")
    privacy: RelationBudget = entry("The budget.")
    model: FitModel = entry("What is learned.")
    output: Output = entry("Where the model goes.")

"""Training that begins with the weights of an earlier version.

Weights mean something only together with the preprocessing that they were trained with: the codes of categories, the
scaling of numbers, the order of the labels. So the earlier preprocessing is used again, where features and labels are
the same. Categories that are new to it are unknown, as in predictions.

Needs numpy only.
"""

from __future__ import annotations

from dataclasses import replace

from pg_tensile.execution.data.preprocessing import Feature, Preprocessing


def difference(earlier: Preprocessing, fitted: Preprocessing) -> str | None:
    """Return why weights trained with the preprocessing `earlier` do not suit rows on which `fitted` was fitted.

    None means that they do."""
    if fitted.text is not None:
        return "a pretrained transformer begins with the weights of its folder"
    names, before = ([feature.name for feature in each.features] for each in (fitted, earlier))
    if names != before:
        changed = sorted({*names} ^ {*before})
        return f"the features are different: {', '.join(changed)}" if changed else "the features have another order"
    for feature, old in zip(fitted.features, earlier.features, strict=True):
        if _form(feature) != _form(old):
            return f'the feature "{feature.name}" has another type or length'
    if (fitted.task, fitted.target.name) != (earlier.task, earlier.target.name):
        return "the target is different"
    if (fitted.labels, fitted.label_values) != (earlier.labels, earlier.label_values):
        return "the labels are different"
    if (fitted.target.transform, fitted.quantiles) != (earlier.target.transform, earlier.quantiles):
        return "the target's transformation or quantiles are different"
    return None


def _form(feature: Feature) -> tuple[object, ...]:
    """Return what a model's inputs depend on, besides the values of the rows."""
    tokens = feature.tokens is not None
    varies = tokens or feature.vectors is not None  # lengths are then those of the earlier preprocessing
    length = None if varies else (feature.length, feature.width)
    return feature.kind, tokens, length, feature.ranks is not None, feature.vectors is not None


def begun_with(earlier: Preprocessing, fitted: Preprocessing) -> Preprocessing:
    """Return the preprocessing of a training that begins with the weights of `earlier`.

    What follows from validation has to be derived again, and the rows decide anew whether answers may be negative."""
    target = replace(earlier.target, nonnegative=fitted.target.nonnegative)
    return replace(earlier, target=target, calibration=None, conformal=None, text=fitted.text)

"""Gradient boosting and other models, with their defaults, on the rows that train_model gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.answers.problems import Held, Problem

MOST_CATEGORIES = 255  # of a column, for gradient boosting; it gets the numbers of more than that

Sides = tuple[pd.DataFrame, pd.DataFrame]  # rows to train on, rows held out


def boosting_features(problem: Problem) -> Sides:
    """Return the features of both sides: numbers, times as numbers, and categories as long as they are not too many."""
    train, test = (side.drop(columns=problem.target).copy() for side in (problem.train, problem.test))
    for name in train:
        if pd.api.types.is_datetime64_any_dtype(train[name].dtype):
            for side in (train, test):
                side[name] = side[name].astype("int64")
        if pd.api.types.is_numeric_dtype(train[name].dtype):
            continue
        dtype = pd.CategoricalDtype(sorted(train[name].dropna().astype(str).unique()))
        for side in (train, test):
            values = side[name].astype(str).where(side[name].notna()).astype(dtype)
            side[name] = values if len(dtype.categories) <= MOST_CATEGORIES else values.cat.codes
    return train, test


def imputed_features(problem: Problem) -> Sides:
    """Return the features with the means of the training rows in place of missing numbers, for peers without them."""
    train, test = boosting_features(problem)
    means = train.mean(numeric_only=True)
    return train.fillna(means), test.fillna(means)


def answers_of(
    problem: Problem, regressor: Any, classifier: Any, features: Callable[[Problem], Sides] = boosting_features
) -> Held:
    """Return the answers of a model with scikit-learn's interface."""
    train, test = features(problem)
    target = problem.train[problem.target]
    model = regressor if problem.is_regression else classifier
    model.fit(train, target if problem.is_regression else target.astype(str))
    predicted = model.predict(test)
    return Held(predicted, predicted if problem.is_regression else model.predict_proba(test)[:, -1])


def hist_gradient_boosting(problem: Problem, seed: int) -> Held:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    return answers_of(
        problem, HistGradientBoostingRegressor(random_state=seed), HistGradientBoostingClassifier(random_state=seed)
    )


def lightgbm(problem: Problem, seed: int) -> Held:
    import lightgbm

    options: dict[str, Any] = {"random_state": seed, "verbose": -1}
    return answers_of(problem, lightgbm.LGBMRegressor(**options), lightgbm.LGBMClassifier(**options))


def lightgbm_stopped_early(problem: Problem) -> None:
    """Fit LightGBM with at most 300 rounds, as long as a fifth of the rows get better."""
    import lightgbm

    rows, _ = boosting_features(problem)
    target, fitted = problem.train[problem.target].to_numpy(), len(rows) * 4 // 5
    if not problem.is_regression:
        target = np.unique(target.astype(str), return_inverse=True)[1]
    model = (lightgbm.LGBMRegressor if problem.is_regression else lightgbm.LGBMClassifier)(n_estimators=300, verbose=-1)
    held = {"eval_X": rows[fitted:], "eval_y": target[fitted:]}
    model.fit(rows[:fitted], target[:fitted], **held, callbacks=[lightgbm.early_stopping(50, verbose=False)])


def catboost(problem: Problem, seed: int) -> Held:
    from catboost import CatBoostClassifier, CatBoostRegressor

    columns = [name for name in problem.train if name != problem.target]
    others = [name for name in columns if not pd.api.types.is_numeric_dtype(problem.train[name].dtype)]
    texts = [name for name in others if not pd.api.types.is_datetime64_any_dtype(problem.train[name].dtype)]
    settings = {"random_seed": seed, "cat_features": texts, "verbose": 0, "allow_writing_files": False}

    def features(problem: Problem) -> Sides:
        sides = (side[columns].astype(dict.fromkeys(texts, object)) for side in (problem.train, problem.test))
        train, test = (side.fillna(dict.fromkeys(texts, "")).astype(dict.fromkeys(texts, str)) for side in sides)
        for side in (train, test):
            for name in set(others) - set(texts):
                side[name] = side[name].astype("int64")
        return train, test

    held = answers_of(problem, CatBoostRegressor(**settings), CatBoostClassifier(**settings), features)
    return Held(np.ravel(held.predicted), held.probability)


def xgboost(problem: Problem, seed: int) -> Held:
    from xgboost import XGBClassifier, XGBRegressor

    settings: dict[str, Any] = {"random_state": seed, "enable_categorical": True}
    if problem.is_regression:
        return answers_of(problem, XGBRegressor(**settings), None)
    labels, codes = np.unique(problem.train[problem.target].astype(str), return_inverse=True)
    train, test = boosting_features(problem)
    chances = XGBClassifier(**settings).fit(train, codes).predict_proba(test)
    return Held(labels[chances.argmax(1)], chances[:, -1])


def realmlp(problem: Problem, seed: int) -> Held:
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

    options: dict[str, Any] = {"random_state": seed, "device": "cpu", "n_threads": 1}
    return answers_of(problem, RealMLP_TD_Regressor(**options), RealMLP_TD_Classifier(**options), imputed_features)


PEERS = {
    "hist_gradient_boosting": hist_gradient_boosting,
    "lightgbm": lightgbm,
    "catboost": catboost,
    "xgboost": xgboost,
}
ADDED = {"realmlp": realmlp}  # peers that are measured by themselves

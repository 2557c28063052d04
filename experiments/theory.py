"""The error bounds of paper 000 as curves, to draw beside measurements.

The paper states them up to constants and logarithms. Here every hidden constant and logarithm is one, the factor
sqrt(log 1/delta) of Delta among them: the curves show slopes (in n, d, k, m, epsilon), never values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """The quantities the bounds are made of. For unit heads in k dimensions sigma_max = sigma_min = k^-1/2."""

    users: int
    features: int
    rank: int
    rows: int
    noise: float  # R
    head_norm: float  # Gamma, the largest |v_i|
    sigma_max: float  # of V / sqrt n; stands for Lambda too
    sigma_min: float  # of V / sqrt n; stands for lambda too


@dataclass(frozen=True)
class Terms:
    """What a bound adds up: the price of privacy, of few rows in all, and of what a method starts from or ends with."""

    privacy: float
    sampling: float
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.privacy + self.sampling + self.rest


def lemma_9(p: Problem, epsilon: float, rounds: int, step: float | None = None, start: float = 0.5) -> Terms:
    """dist(U_T, U*) after T rounds of step eta (1/(2 sigma_max^2) unless given) from dist(U_0, U*) = start.

    rest = (1 - c eta sigma_min^2 / 4)^(T/2) start, c = 1 - start^2; privacy = (R + Gamma) Gamma d sqrt(k T) /
    (n eps sigma_min^2); sampling = sqrt((R^2 + Gamma^2) Gamma^2 d T / (n m sigma_min^4)).
    """
    eta = 1 / (2 * p.sigma_max**2) if step is None else step
    contraction = 1 - (1 - start**2) * eta * p.sigma_min**2 / 4
    gamma, least = p.head_norm, p.sigma_min**2
    return Terms(
        privacy=(p.noise + gamma) * gamma * p.features * (p.rank * rounds) ** 0.5 / (p.users * epsilon * least),
        sampling=((p.noise**2 + gamma**2) * gamma**2 * p.features * rounds / (p.users * p.rows)) ** 0.5 / least,
        rest=contraction ** (rounds / 2) * start,
    )


def theorem_10(p: Problem, epsilon: float) -> Terms:
    """Excess population risk of Private FedRep.

    With c = (R^2 + Gamma^2) Gamma^4 Lambda^2 / (sigma_min^4 lambda^2):
    privacy = c d^2 k / (n eps)^2, sampling = c d / (n m), rest = R^2 k / m (the heads).
    """
    spread = p.sigma_max**2 / p.sigma_min**6
    common = (p.noise**2 + p.head_norm**2) * p.head_norm**4 * spread
    return Terms(
        privacy=common * p.features**2 * p.rank / (p.users * epsilon) ** 2,
        sampling=common * p.features / (p.users * p.rows),
        rest=p.noise**2 * p.rank / p.rows,
    )


def lemma_12(p: Problem, epsilon: float) -> Terms:
    """dist(U_init, U*) of the private initialisation.

    privacy = (R^2 + Gamma^2) d^(3/2) / (n eps sigma_min^2);
    sampling = sqrt((R^2 + Gamma^2) Gamma^2 d / (n m sigma_min^4)).
    """
    size, least = p.noise**2 + p.head_norm**2, p.sigma_min**2
    return Terms(
        privacy=size * p.features**1.5 / (p.users * epsilon * least),
        sampling=(size * p.head_norm**2 * p.features / (p.users * p.rows)) ** 0.5 / least,
    )


def excess_risk(p: Problem, distance: float) -> float:
    """The excess risk a distance between representations costs at most: (dist Gamma)^2, the heads fitted exactly."""
    return (min(distance, 1.0) * p.head_norm) ** 2


def theorem_17(users: int, rows: int, rank: int, epsilon: float, reach: float) -> Terms:
    """Excess 0-1 loss of margin selection over the best margin loss; `reach` = r Gamma / rho. No d anywhere.

    privacy = reach^2 k / (n eps), sampling = reach / sqrt m.
    """
    return Terms(privacy=reach**2 * rank / (users * epsilon), sampling=reach / rows**0.5)

"""The real algorithms behind GPreempt's workloads Y and Z, written once for whatever arrays there are (PyTorch's or NumPy's).

- `Weather`: the scheme of miniWeather (https://github.com/mrnorman/miniWeather): dry two-dimensional Euler equations around a hydrostatic
  state, finite volumes with fourth-order interpolation and hyperviscosity, directions split, three-stage Runge-Kutta. Periodic in x, walls in z.
- `distances` (BFS, SSSP), `components` (CC) and `ranks` (PageRank) on a list of edges, each until nothing changes, as the host loops of
  EMOGI (https://github.com/illinois-impact/EMOGI) do.

Graphs of the published size are made by `power_law_weights`; the published one (SuiteSparse's crankseg_1) is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# --- weather ------------------------------------------------------------------------------------

GRAVITY, CP, CV, RD, P0, THETA0 = 9.8, 1004.0, 717.0, 287.0, 1e5, 300.0
GAMMA = CP / CV
C0 = (RD * P0 ** (-RD / CP)) ** GAMMA
X_M, Z_M, SPEED, CFL, HYPERVISCOSITY = 2e4, 1e4, 450.0, 1.5, 0.05
DENSITY, U, W, RHO_THETA = range(4)
GHOSTS = 2


def hydrostatic(z: float) -> tuple[float, float]:
    """Density and density times potential temperature at a height, of air of one potential temperature at rest."""
    exner = 1.0 - GRAVITY * z / (CP * THETA0)
    pressure = P0 * exner ** (CP / RD)
    rho_theta = (pressure / C0) ** (1 / GAMMA)
    return rho_theta / THETA0, rho_theta


class Weather:
    """A rising warm bubble. `column(values)` makes an array of shape (n, 1), `zeros(shape)` one of zeros."""

    def __init__(self, nz: int, nx: int, column: Callable[[list[float]], Any], zeros: Callable[[tuple[int, ...]], Any], cat: Any) -> None:
        self.nz, self.nx, self.cat = nz, nx, cat
        self.dx, self.dz = X_M / nx, Z_M / nz
        self.dt, self.even = min(self.dx, self.dz) / SPEED * CFL, True
        cells = [hydrostatic((k + 0.5) * self.dz) for k in range(-GHOSTS, nz + GHOSTS)]
        faces = [hydrostatic(k * self.dz) for k in range(nz + 1)]
        self.density, self.rho_theta = column([it[0] for it in cells]), column([it[1] for it in cells])
        self.face_density, self.face_rho_theta = column([it[0] for it in faces]), column([it[1] for it in faces])
        self.face_pressure = column([C0 * it[1] ** GAMMA for it in faces])
        self.state = zeros((4, nz, nx))
        for k in range(nz):
            for i in range(nx):
                away = math.hypot(((i + 0.5) * self.dx - X_M / 2) / 2000, ((k + 0.5) * self.dz - 2000) / 2000)
                if away < 1:
                    self.state[RHO_THETA, k, i] = cells[k + GHOSTS][0] * 3 * math.cos(away * math.pi / 2) ** 2

    def _fluxes(self, four: list[Any], speed: int, density: Any, rho_theta: Any, background: Any, viscosity: float) -> Any:
        """Through the faces between the two middle ones of four neighbours; `speed` is the momentum across them."""
        value = (four[1] + four[2]) * (7 / 12) - (four[0] + four[3]) / 12
        third = four[3] - four[0] + (four[1] - four[2]) * 3
        rho = value[DENSITY] + density
        if speed == W:  # no wind through walls
            value[W, 0], value[W, -1] = 0.0, 0.0
            third[DENSITY, 0], third[DENSITY, -1] = 0.0, 0.0
        across, theta = value[speed] / rho, (value[RHO_THETA] + rho_theta) / rho
        pressure = C0 * (rho * theta) ** GAMMA - background
        parts = [rho * across, rho * across * value[U] / rho, rho * across * value[W] / rho, rho * across * theta]
        parts[speed] = parts[speed] + pressure
        return self.cat([it[None] for it in parts], 0) - viscosity * third

    def _change(self, state: Any, dt: float, vertical: bool) -> Any:
        """What one direction makes of a state per second."""
        g = GHOSTS
        if not vertical:
            wide = self.cat([state[:, :, -g:], state, state[:, :, :g]], 2)
            four = [wide[:, :, at : at + self.nx + 1] for at in range(4)]
            flux = self._fluxes(four, U, self.density[g:-g], self.rho_theta[g:-g], 0.0, HYPERVISCOSITY * self.dx / (16 * dt) * -1)
            return (flux[:, :, :-1] - flux[:, :, 1:]) / self.dx
        below, above = (self.cat([edge] * g, 1) for edge in (state[:, :1], state[:, -1:]))
        tall = self.cat([below, state, above], 1)
        tall[W, :g], tall[W, -g:] = 0.0, 0.0
        tall[U, :g] = tall[U, g : g + 1] / self.density[g : g + 1] * self.density[:g]
        tall[U, -g:] = tall[U, -g - 1 : -g] / self.density[-g - 1 : -g] * self.density[-g:]
        four = [tall[:, at : at + self.nz + 1] for at in range(4)]
        viscosity = -HYPERVISCOSITY * self.dz / (16 * dt)
        flux = self._fluxes(four, W, self.face_density, self.face_rho_theta, self.face_pressure, viscosity)
        change = (flux[:, :-1] - flux[:, 1:]) / self.dz
        change[W] -= state[DENSITY] * GRAVITY
        return change

    def step(self) -> None:
        """One time step, in place: both directions, the order alternating."""
        for vertical in (False, True) if self.even else (True, False):
            forcing = self.state
            for part in (3, 2, 1):
                forcing = self.state + self._change(forcing, self.dt / part, vertical) * (self.dt / part)
            self.state[...] = forcing
        self.even = not self.even


# --- graphs -------------------------------------------------------------------------------------

Least = Callable[[Any, Any, Any], Any]  # (value, at, candidates): the least of each value and its candidates


def settled(value: Any, improve: Callable[[Any], Any], same: Callable[[Any, Any], bool]) -> Any:
    """What is left when a round changes nothing any more."""
    while not same(value, new := improve(value)):
        value = new
    return value


def distances(first: Any, source: Any, target: Any, lengths: Any, least: Least, same: Callable[[Any, Any], bool]) -> Any:
    """Least distance of each node: `first` is infinite but at the roots. With lengths of 1 the levels of a breadth-first search."""
    return settled(first, lambda value: least(value, target, value[source] + lengths), same)


def components(names: Any, source: Any, target: Any, least: Least, same: Callable[[Any, Any], bool]) -> Any:
    """The least name in each node's component; edges go both ways."""
    return settled(names, lambda value: least(value, target, value[source]), same)


def ranks(first: Any, source: Any, target: Any, degree: Any, total: Callable[[Any, Any], Any], tolerance: float = 1e-3) -> Any:
    """PageRank with damping 0.85 until a round moves less than `tolerance` of all; `total(at, values)` sums values by node."""
    value, nodes = first, len(first)
    while True:
        new = total(target, (value / degree)[source]) * 0.85 + 0.15 / nodes
        if float(abs(new - value).sum()) < tolerance:
            return new
        value = new


def power_law_weights(nodes: int, exponent: float = 2.5) -> list[float]:
    """Expected degrees, up to a factor, of a graph whose degrees have this power law: edges' ends are drawn by them (Chung and Lu)."""
    return [(at + 1) ** (-1 / (exponent - 1)) for at in range(nodes)]

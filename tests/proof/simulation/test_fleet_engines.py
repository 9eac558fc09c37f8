"""Two real engines find as much of the workload's prompts as the fleet model says that they do."""

from contextlib import closing

import pytest

from localinfer.loading.options import model_path
from localinfer.models.load.loader import load_model
from tests.proof.simulation.fleet import FleetOptions, simulate
from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_engines import measure
from tests.proof.simulation.fleet_replica import ReplicaOptions
from tests.proof.simulation.fleet_users import visits_of
from tests.proof.simulation.fleet_workload import REPLICA_KV_TOKENS, make_workload


@pytest.fixture(scope="module")
def model():
    with closing(load_model(model_path(None), threads=1)) as model:
        yield model


@pytest.mark.parametrize(
    ("policy", "num_conversations", "least", "most"), [("prefix", 7, 0.95, 1.0), ("random", 7, 0.3, 0.6)]
)
def test_hit_rates_are_those_of_the_model(model, policy, num_conversations, least, most):
    workload = make_workload(1, num_conversations=num_conversations)
    costs = StepCosts.read("demo", beside="engine")
    options = FleetOptions(replicas=2, policy=policy, replica=ReplicaOptions(kv_tokens=REPLICA_KV_TOKENS))
    measured = measure(model, costs, workload, options, 1.0)
    predicted = simulate(costs, options, visits_of(workload))
    assert measured.requests == predicted.requests == len(workload.turns)
    assert least <= measured.hit_rate <= most
    assert predicted.hit_rate == pytest.approx(measured.hit_rate, rel=0.2)

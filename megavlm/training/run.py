"""A whole run: ranks and servers up, the trainer that the recipe names, and what is left behind at the end."""

from contextlib import ExitStack

import torch

from megavlm.config.dump import write
from megavlm.config.schema import GRPO, Config
from megavlm.parallel.mesh import build_mesh, init_distributed, shutdown
from megavlm.rollout.weights.sync import WeightSync
from megavlm.training.driver import Driver
from megavlm.training.finish import finish
from megavlm.training.loop import Loop
from megavlm.training.servers import connect
from megavlm.training.session import Session
from megavlm.training.sft import SupervisedTrainer
from megavlm.training.trainer import GRPOTrainer


def train(config: Config) -> None:
    init_distributed()
    mesh = build_mesh(tensor=config.parallel.tensor, seed=config.run.seed)
    with ExitStack() as stack:
        connection = None
        if mesh.is_driver:
            write(config, config.run.dir)
            if generates(config):
                connection = stack.enter_context(connect(config, config.model.folder))
        algorithm = config.algorithm
        is_grpo = isinstance(algorithm, GRPO)
        session = Session(config, mesh, updates_per_step=algorithm.minibatches if is_grpo else 1)
        driver = None
        if mesh.is_driver:
            client = None if connection is None else connection.client
            driver = Driver(config, session.hf_config, mesh, client)
        sync = None
        if generates(config):
            sync = WeightSync(
                session.entries,
                session.model,
                tp_group=mesh.groups.tp,
                servers=None if connection is None else connection.servers,
                transport=None if connection is None else connection.transport,
                dtype=getattr(torch, config.model.dtype),
                objects=mesh.objects,
            )
        trainer: Loop = GRPOTrainer(session, driver, sync) if is_grpo else SupervisedTrainer(session, driver, sync)
        complete = trainer.run()
        finish(session, driver, complete)
    shutdown()


def generates(config: Config) -> bool:
    """Whether the run needs rollout servers: to learn from, or to evaluate with."""
    evaluation = config.evaluation
    return isinstance(config.algorithm, GRPO) or bool(evaluation.before or evaluation.after or evaluation.every)

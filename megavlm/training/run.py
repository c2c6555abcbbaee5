"""A whole run: ranks and servers up, the trainer that the recipe names, and what is left behind."""

from contextlib import ExitStack

from megavlm.config.dump import write
from megavlm.config.schema import PPO, Config, PolicyOptimization
from megavlm.parallel.mesh import build_mesh, init_distributed, shutdown
from megavlm.rollout.weights.sync import WeightSync
from megavlm.training.driver import Driver
from megavlm.training.finish import finish
from megavlm.training.loop import Loop
from megavlm.training.options import layout
from megavlm.training.ppo import PPOTrainer
from megavlm.training.run_lock import run_lock
from megavlm.training.servers import connect
from megavlm.training.session import Session
from megavlm.training.sft import SupervisedTrainer
from megavlm.training.trainer import PolicyTrainer
from megavlm.training.weights import weight_sync


def train(config: Config) -> None:
    """Called on every rank; rank 0 is the driver too, and starts the rollout servers."""
    init_distributed()
    mesh = build_mesh(layout(config), seed=config.run.seed)
    with ExitStack() as stack:
        connection = None
        if mesh.is_driver:
            stack.enter_context(run_lock(config.run.dir))
            write(config, config.run.dir)
            if generates(config):
                connection = stack.enter_context(connect(config, config.model.folder))
        session = Session(config, mesh)
        driver = None
        if mesh.is_driver:
            driver = Driver(config, session.hf_config, mesh, connection)
        sync = None
        if generates(config):
            sync = weight_sync(session, None if connection is None else connection.fleet)
            stack.callback(sync.close)
        complete = _trainer(session, driver, sync).run()
        finish(session, driver, complete)
    shutdown()


def generates(config: Config) -> bool:
    """Whether the run needs rollout servers: to learn from, or to evaluate with."""
    evaluation = config.evaluation
    evaluates = evaluation.before or evaluation.after or evaluation.every > 0
    return isinstance(config.algorithm, PolicyOptimization) or evaluates


def _trainer(session: Session, driver: Driver | None, sync: WeightSync | None) -> Loop:
    if isinstance(session.config.algorithm, PolicyOptimization):
        assert sync is not None
        is_ppo = isinstance(session.config.algorithm, PPO)
        return (PPOTrainer if is_ppo else PolicyTrainer)(session, driver, sync)
    return SupervisedTrainer(session, driver, sync)

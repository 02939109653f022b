"""The one error of the simulator's own making."""


class SimulatorError(RuntimeError):
    """The simulated NPU cannot be built, loaded or used here. The message is one line that says what to do."""

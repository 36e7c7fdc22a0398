"""The paper's evaluation, replayed in the simulator beside the raw numbers of the authors."""

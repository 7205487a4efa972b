"""The paper's evaluation: workloads, a simulated GPU, policies that no
server has, and the figures."""

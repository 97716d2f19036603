from echo_node.host.sensors.gpu_reading import GpuReading, together


def test_the_worst_of_all_gpus_counts() -> None:
    first, second = GpuReading(others=0.1, celsius=80.0), GpuReading(others=0.4, hub=0.7, celsius=60.0, watts=200.0)
    assert together([first, second]) == GpuReading(others=0.4, hub=0.7, celsius=80.0, watts=200.0)


def test_figures_that_no_gpu_reports_are_missing() -> None:
    assert together([]) == together([GpuReading()]) == GpuReading()

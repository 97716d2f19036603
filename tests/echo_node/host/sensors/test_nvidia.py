from echo_node.host.sensors.nvidia import NvidiaSensors, share_of_others


def test_a_machine_without_a_driver_tells_nothing_each_time() -> None:
    sensors = NvidiaSensors()
    try:
        read = [sensors.read((1,)) for _ in range(2)]
    finally:
        sensors.close()
    assert read[0] == read[1] == [] or all(one.celsius is not None for one in read[1])


def test_what_others_take_is_their_most_in_the_newest_second() -> None:
    second = 1_000_000
    samples = [(7, 90, 10 * second), (8, 30, 10 * second), (8, 50, 9 * second), (9, 99, 8 * second)]
    assert share_of_others(samples, own=(7,)) == 0.5
    assert share_of_others(samples, own=(7, 8)) == 0.0
    assert share_of_others(samples, own=()) == 1.0
    assert share_of_others([], own=()) == 0.0

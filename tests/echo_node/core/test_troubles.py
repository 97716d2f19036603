from echo_node.core.troubles import OVER, Trouble, TroubleCode, Troubles, trouble_of
from echo_shared.errors import DISK_FULL, StorageError, SwarmError

FULL = Trouble(TroubleCode.DISK_FULL, "The disk is full.")


def test_a_trouble_of_many_parts_is_reported_once() -> None:
    troubles = Troubles()
    assert troubles.begin("the spool", FULL) == "The disk is full."
    assert troubles.begin("a fetch", FULL) is None and troubles.begin("the spool", FULL) is None
    assert troubles.now == (FULL,)
    assert troubles.end("the spool") is None, "the fetch still has it"
    assert troubles.end("the spool") is None
    assert troubles.end("a fetch") == OVER[TroubleCode.DISK_FULL]
    assert troubles.now == () and troubles.end("a fetch") is None
    assert troubles.begin("a fetch", FULL) == "The disk is full.", "a new occurrence is told again"


def test_a_part_whose_trouble_changes_tells_the_new_one() -> None:
    troubles = Troubles()
    troubles.begin("a fetch", FULL)
    nobody = Trouble(TroubleCode.FETCH, "Nobody serves it.")
    assert troubles.begin("a fetch", nobody) == "Nobody serves it."
    assert troubles.now == (nobody,)


def test_each_code_has_a_text_for_its_end() -> None:
    assert set(OVER) == set(TroubleCode)


def test_errors_are_reported_in_one_line_with_advice() -> None:
    full = StorageError("The disk is full.", got="/x", do="Free some.", code=DISK_FULL)
    assert trouble_of(full, otherwise=TroubleCode.FETCH) == Trouble(
        TroubleCode.DISK_FULL, "The disk is full. (/x) Free some."
    )
    assert trouble_of(StorageError("No."), otherwise=TroubleCode.FETCH) == Trouble(TroubleCode.STORAGE, "No.")
    assert trouble_of(SwarmError("No."), otherwise=TroubleCode.FETCH).code is TroubleCode.FETCH

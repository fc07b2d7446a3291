"""What is shown and kept of an address that is also a key."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.addresses import (
    ADDRESS_VARIABLE,
    holds_password,
    is_withheld,
    require_apart,
    take_secrets,
    whole_address,
    withheld,
)
from drivetrain.config import DataConfig, ModelConfig, RunConfig, load_config, to_toml
from drivetrain.config.blend import corpora_of
from drivetrain.engine.data.opening import open_data
from drivetrain.engine.data.prepare import prepare
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.launch.names import environment_of

AMAZON = (
    "https://b.s3.amazonaws.com/c/m.bin?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F20261201%2Fs3&"
    "X-Amz-Date=20261201T000000Z&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature=9f2c"
)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (AMAZON, "https://b.s3.amazonaws.com/c/m.bin?signature=withheld"),
        (AMAZON + "&versionId=7", "https://b.s3.amazonaws.com/c/m.bin?versionId=7&signature=withheld"),
        ("https://a.blob.core.windows.net/c/m?sv=2021&se=y&sp=r&sig=Ab%2Fc", None),
        ("https://cdn/m?Expires=1&Policy=eyJ9&Key-Pair-Id=K1&Signature=q~", None),
        ("https://h/m?X%2DAmz%2DSignature=zz", None),
        ("https://h/m?sig=abc.baked-0123456789ab", "https://h/m?signature=withheld.baked-0123456789ab"),
        ("https://h/m#access_token=abc", "https://h/m#signature=withheld"),
        ("https://h/m?t=eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9", "https://h/m?t=withheld-d328d517e090"),
        ("https://me:secret@host/x", "https://withheld@host/x"),
        ("zip://a::ftp://me:sec@ret@host/x.zip", "zip://a::ftp://withheld@host/x.zip"),
        ("https://ghp_abcdefghijklmnop@host/x", "https://withheld@host/x"),
        ("HTTPS://ghp_abcdefghijklmnop@host/x", "HTTPS://withheld@host/x"),
        ("http://[fe80::1%25eth0]:8080/a%20b.txt?sig=%2Fz", None),
        ("https://p/?u=https://me:pw@h/x", "https://p/?u=https://withheld@h/x"),
        ("https://p/?u=https%3A%2F%2Fme%3Apw%40h", "https://p/?u=withheld-9181046c301c"),
        ("https://h/a?x=1;sig=z", "https://h/a?x=1&signature=withheld"),
        ("https://h/a?hdnts=st=1~exp=2~acl=/*~hmac=ab12", None),
        ("https://h/a?sign=ab&t=1", "https://h/a?t=1&signature=withheld"),
        ("https://h/a?md5=AbC123defGHI456jklMNO7&expires=12", None),
        ("https://h/get?file=https%3A%2F%2Fk%2Fa%3Fsig%3Dz", "https://h/get?file=withheld-18b512f15cab"),
    ],
)
def test_a_secret_is_taken_out_by_the_rule_and_the_rule_leaves_its_result_alone(
    address: str, shown: str | None
) -> None:
    shown = shown or f"{address.partition('?')[0]}?signature=withheld"
    assert withheld(address) == shown
    assert withheld(shown) == shown
    assert is_withheld(shown) or holds_password(address)


@pytest.mark.parametrize(
    "address",
    [
        "s3://b/x?versionId=3sL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY",
        "https://h/get?file=corpora/mine&raw=true",
        "https://drive/uc?id=1A2b3C4d5E6f7G8h9I0j1K2l3M4n",
        "https://h/a?se=1",
        "abfs://container@account.dfs.core.windows.net/x",
        "https://h/page#heading",
        "https://me@host/x",
        "corpora/mine?sig=not-a-url",
        "github://owner:repository@main/x.jsonl",
        "https://h/x?author=me&tokenizer=gpt2&max_tokens=3",
        "https://h/x?a=1;b=2&c",
        "http://[::1]:8080/a%20b.txt",
        "file:///C:/a/b.txt",
    ],
)
def test_what_is_no_secret_stays(address: str) -> None:
    assert withheld(address) == address
    assert not is_withheld(address)
    assert not holds_password(address)


@given(
    st.text(alphabet="abcXYZ019-_.~%+/", min_size=8),
    st.sampled_from(["sig", "X-Goog-Signature", "access_token"]),
)
def test_no_secret_outlives_its_name(secret: str, name: str) -> None:
    words = f"0.3 'https://h/a?{name}={secret}&x=1' 0.7 b: 403, url='https://h/c?v=2&{name}={secret}'"
    assert f"={secret}" not in withheld(words)
    assert len(corpora_of(withheld(f"1 'https://h/a?{name}={secret}' 2 b"))) == 2


def test_the_command_line_keeps_no_secret_and_leaves_the_address_to_who_reads_it() -> None:
    words = ["train", "data.data_path=0.3 https://h/a?token=x 0.7 https://h/b?sig=old.baked-0123456789ab"]
    environment = {ADDRESS_VARIABLE: "https://h/b?sig=older"}
    take_secrets(words, environment)
    assert words[1] == (
        "data.data_path=0.3 https://h/a?signature=withheld 0.7 https://h/b?signature=withheld.baked-0123456789ab"
    )
    assert environment[ADDRESS_VARIABLE] == "https://h/b?sig=older https://h/a?token=x https://h/b?sig=old"
    assert whole_address("https://h/b?signature=withheld", environment) == "https://h/b?sig=old"
    other_order = {ADDRESS_VARIABLE: "https://h/b?sig=z&v=1"}
    assert whole_address("https://h/b?signature=withheld&v=1", other_order) == "https://h/b?sig=z&v=1"
    assert whole_address("https://h/other?signature=withheld", environment) is None
    assert whole_address("https://h/c?v=1", environment) == "https://h/c?v=1"
    take_secrets(other := ["https://me:secret@h/x"], environment)
    assert other == ["https://withheld@h/x"]
    assert holds_password(other[0]), "it is refused as the whole one would be"
    assert "secret" not in environment[ADDRESS_VARIABLE]


@pytest.mark.parametrize("sign", [":", ",", ";", ")", ""])
def test_a_sentence_keeps_its_signs_behind_an_address(sign: str) -> None:
    text = f"(https://h/m?v=1&signature=withheld{sign} is not kept"
    assert withheld(text) == text


def test_the_text_of_a_prompt_is_left_as_it_is() -> None:
    words = ["generate", "latest", "--prompt", "see https://h/a?sig=z", "--prompt=https://me:pw@h"]
    take_secrets(left := words.copy(), environment := {})
    assert left == words
    assert not environment


def test_two_addresses_that_differ_in_what_is_withheld_alone_are_not_taken_for_one() -> None:
    with pytest.raises(
        DrivetrainError, match=r"https://h/get\?signature=withheld: two addresses differ"
    ) as caught:
        take_secrets(["prepare", "https://h/get?key=a.txt", "https://h/get?key=b.txt"], {})
    assert "a.txt" not in str(caught.value)
    require_apart(["https://h/get?key=a", "https://h/get?key=a", "https://h/b?key=a"])
    with pytest.raises(DrivetrainError, match="taken for one"):
        prepare(["https://h/get?key=a.txt", "https://h/get?key=b.txt"], "nowhere")
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=300, seq_length=8)
    with pytest.raises(DrivetrainError, match="taken for one"):
        open_data(DataConfig(data_path="1 https://h/get?key=a 2 https://h/get?key=b"), model)


def test_a_file_with_a_signed_address_is_refused_with_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "llama-2m"\n[data]\ndata_path = "https://h/m?sig=SECRET"\n')
    with pytest.raises(ConfigurationError) as caught:
        load_config(str(file))
    assert f"{ADDRESS_VARIABLE} and write https://h/m?signature=withheld" in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_written_configuration_keeps_no_signature() -> None:
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 300, "seq_length": 8}
    config = RunConfig.model_validate({"model": model, "data": {"data_path": "https://h/m?sig=SECRET"}})
    assert 'data_path = "https://h/m?signature=withheld"' in to_toml(config)


def test_a_job_file_takes_no_signatures() -> None:
    with pytest.raises(DrivetrainError, match="the job file would hold the signatures"):
        environment_of([f"{ADDRESS_VARIABLE}=https://h/m?sig=SECRET"])
    # Whole, and as the command line leaves them.
    for value in (
        "http://me:pw@h:1",
        "http://withheld@h:1",
        "https://h/m?sig=z",
        "https://h/m?signature=withheld",
    ):
        with pytest.raises(DrivetrainError, match="would hold the secret of an address"):
            environment_of([f"https_proxy={value}"])
    assert environment_of(["https_proxy=http://h:1"]) == {"https_proxy": "http://h:1"}

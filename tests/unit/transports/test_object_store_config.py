from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from asyncloader.transports import InvalidPath, ObjectStoreTransport, RetryPolicy, TransportError
from asyncloader.transports.object_store_config import (
    BucketLocation,
    open_store,
    parse_location,
    retry_config,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and no cloud settings in the environment."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(home: Path, *, credentials: str = "", config: str = "") -> None:
    (home / ".aws").mkdir()
    (home / ".aws/credentials").write_text(credentials)
    (home / ".aws/config").write_text(config)


def opened(url: str, **options: Any) -> Any:
    return open_store(parse_location(url), ObjectStoreTransport(url, **options)._options, None)


def configured(url: str = "s3://bucket", **options: Any) -> dict[str, Any]:
    return dict(opened(url, **options).config)


def connected(**options: Any) -> dict[str, Any]:
    return dict(opened("s3://bucket", **options).client_options or {})


# ---------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket/", BucketLocation("s3", "s3://bucket", "")),
        ("S3A://my.bucket/a/b/", BucketLocation("s3", "s3a://my.bucket", "a/b")),
        ("gs://bucket/100%25 é?#", BucketLocation("gs", "gs://bucket", "100%25 é?#")),
        ("abfs://container/a", BucketLocation("az", "abfs://container", "a")),
        (
            "abfss://files@acme.dfs.core.windows.net/a",
            BucketLocation("az", "abfss://files@acme.dfs.core.windows.net", "a"),
        ),
    ],
)
def test_urls(url: str, location: BucketLocation) -> None:
    """Scheme, bucket and prefix are separated; nothing in the prefix is unescaped, nor by obstore."""
    assert parse_location(url) == location
    store = opened(url, config={} if "@" in url or location.kind != "az" else {"account_name": "x"})
    assert (store.prefix or "") == location.prefix


@pytest.mark.parametrize(
    "url", ["s3:/bucket", "bucket/a", "ftp://bucket", "s3://", "s3:///a", "gs://a:80/b", "az://a b/c", "az://a@b/c"]
)
def test_urls_of_no_store(url: str) -> None:
    """Such a URL is refused before any request."""
    with pytest.raises(ValueError, match="write"):
        parse_location(url)


def test_passwords_in_urls_are_not_repeated() -> None:
    """Some URLs have user and password there, which may be keys; the error does not show them."""
    with pytest.raises(ValueError, match="malformed") as caught:
        parse_location("s3://AKIA:secret@bucket/a")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/a//b", "s3://bucket//a", "s3://bucket/../a", "s3://bucket/a/./b"])
def test_prefixes_are_canonical(url: str) -> None:
    """An object has one name, so a root has one as well."""
    with pytest.raises(InvalidPath, match="not canonical"):
        parse_location(url)


# -------------------------------------------------------------------------------------------------------- retries


def test_how_the_policy_maps_to_obstore() -> None:
    """Budget and back-off become obstore's; without a budget, or without a policy, there is no retry."""
    assert retry_config(RetryPolicy(budget_s=7, first_delay_s=0.5, cap_s=3)) == {
        "max_retries": 1 << 30,
        "retry_timeout": timedelta(seconds=7),
        "backoff": {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=3), "base": 2},
    }
    assert retry_config(RetryPolicy(budget_s=0)) == retry_config(None) == {"max_retries": 0}


# -------------------------------------------------------------------------------------------------------- clients


def test_options_become_obstores() -> None:
    """Each of our options has its name in each store; `config` overrides all."""
    assert configured(endpoint="http://x:1", region="eu-west-1", skip_signature=True) | {"bucket": ""} == {
        "bucket": "",
        "endpoint": "http://x:1",
        "region": "eu-west-1",
        "skip_signature": "true",
    }
    assert configured(region="eu-west-1", config={"region": "eu-west-2"})["region"] == "eu-west-2"
    assert configured("gs://bucket", endpoint="http://x:1", skip_signature=True)["base_url"] == "http://x:1"
    azure = configured("abfss://files@acme.dfs.fabric.microsoft.com", endpoint="http://x:1", skip_signature=True)
    assert (azure["account_name"], azure["endpoint"], azure["use_fabric_endpoint"]) == ("acme", "http://x:1", "true")


def test_timeouts_become_obstores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole download has no time limit; a plain http endpoint allows http, also from the environment."""
    options = connected(connect_s=3, stalled_s=4, client={"user_agent": "me"})
    assert options == {"connect_timeout": "3s", "read_timeout": "4s", "timeout": "30days", "user_agent": "me"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://x:1")
    assert connected()["allow_http"] == "true"
    assert "allow_http" not in connected(endpoint="https://x")


def test_a_configuration_that_obstore_refuses() -> None:
    """The error has the root and the reason."""
    with pytest.raises(TransportError, match=r"s3://bucket cannot be opened: .*no_such_setting"):
        configured(config={"no_such_setting": "1"})
    with pytest.raises(TransportError, match=r"az://files cannot be opened: .*[Aa]ccount"):
        configured("az://files")
    with pytest.raises(TransportError, match="cannot be opened"):
        configured("abfss://files@acme.dfs.core.chinacloudapi.cn/a")


# --------------------------------------------------------------------------------------------------- AWS profiles


def test_keys_of_the_default_profile(home: Path) -> None:
    """Keys, region and endpoint are read as the AWS tools write them; a percent sign in a key is literal."""
    write(
        home,
        credentials="[default]\naws_access_key_id = A\naws_secret_access_key = s%e\naws_session_token=t\n[other]\n",
        config="[default]\nregion = eu-west-1\nendpoint_url = https://s3.example\n",
    )
    found = configured()
    assert (found["access_key_id"], found["secret_access_key"], found["session_token"]) == ("A", "s%e", "t")
    assert (found["region"], found["endpoint"]) == ("eu-west-1", "https://s3.example")


def test_a_named_profile_in_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names profile and files; the config file calls its sections ``profile x``."""
    (tmp_path / "keys").write_text("[x]\naws_access_key_id = A\n")  # half a key counts as no key
    (tmp_path / "conf").write_text("[profile x]\naws_access_key_id = B\naws_secret_access_key = b\n[x]\nregion=no\n")
    monkeypatch.setenv("AWS_PROFILE", "x")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "conf"))
    found = configured()
    assert (found["access_key_id"], found["secret_access_key"]) == ("B", "b")
    assert found.get("region") != "no"


def test_what_comes_before_a_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and environment have precedence, as a whole: the key of one and the secret of another never meet."""
    keys = "[default]\naws_access_key_id = A\naws_secret_access_key = a\n"
    write(home, credentials=keys, config="[default]\nregion = r1\n")
    assert configured(region="r2")["region"] == "r2"
    own = configured(config={"access_key_id": "B", "secret_access_key": "b"})
    assert (own["access_key_id"], own["secret_access_key"]) == ("B", "b")
    assert "access_key_id" not in configured(skip_signature=True)
    monkeypatch.setenv("AWS_REGION", "r3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "C")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c")
    found = configured()
    # obstore does not report the settings that it found in the environment itself.
    assert (found.get("region", "r3"), found.get("access_key_id", "C")) == ("r3", "C")


@pytest.mark.parametrize("setting", ["sso_session", "role_arn", "credential_process"])
def test_profiles_that_need_more_than_keys(home: Path, setting: str) -> None:
    """Access that obstore does not support is refused, not replaced by another identity; given credentials win."""
    write(home, config=f"[default]\n{setting} = x\n")
    with pytest.raises(TransportError, match=f"'default' gets its keys by {setting}.*Boto3CredentialProvider"):
        configured()
    assert configured(credentials=lambda: None)["bucket"] == "bucket"


def test_a_profile_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name is an error; having no files at all is usual."""
    assert configured()["bucket"] == "bucket"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(TransportError, match=r"profile 'nobody' .*is in neither"):
        configured()


def test_a_broken_file_does_not_leak(home: Path) -> None:
    """The error names the file and quotes no line of it."""
    write(home, credentials="aws_secret_access_key = hidden\n")
    with pytest.raises(TransportError, match="credentials cannot be read: MissingSectionHeaderError") as caught:
        configured()
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None

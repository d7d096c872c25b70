"""Configures an object store's client: parses the URL, finds credentials and maps the options.

Data path: object_store -> [object_store_config] -> object_store_client.

Credentials are looked up in `config`, then in the places of each store's own tools:

    s3   AWS_ACCESS_KEY_ID ..., web identity, the profile's keys in ~/.aws/credentials and ~/.aws/config
         (AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE, AWS_CONFIG_FILE), container and instance roles
    gs   GOOGLE_SERVICE_ACCOUNT ..., GOOGLE_APPLICATION_CREDENTIALS, gcloud's application default, the instance
    az   AZURE_STORAGE_ACCOUNT_NAME with _KEY, SAS or client secret, workload and managed identity

obstore does all of this except the AWS profiles, of which the plain settings are read here: keys, region, endpoint. A
profile with another method (SSO, a role to assume, a program) is refused with advice: falling back to the instance's
role would read with another identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import InvalidPath, TransportError
from asyncloader.transports.retry import RetryPolicy

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    Store = AzureStore | GCSStore | S3Store

_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", **dict.fromkeys(("az", "azure", "abfs", "abfss", "adl"), "az")}
_URL = re.compile(r"([A-Za-z0-9]+)://([^/]*)/?(.*)", re.DOTALL)

# obstore's option names that differ between stores.
_ENDPOINT = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}

# Settings that a profile can have instead of keys, which need AWS's own SDK.
_INDIRECT = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")

_YES = frozenset({"true", "1", "yes", "on"})
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}

# By default obstore limits a whole request, including its body, to 30 s: too short for large objects.
_FOR_EVER = timedelta(days=30)


class BucketLocation(NamedTuple):
    """The root of a transport.

    Attributes:
        kind: ``"s3"``, ``"gs"`` or ``"az"``.
        bucket: the URL of the bucket, or of Azure's container, which may name its account.
        prefix: the prefix of all paths, without leading or trailing slash; empty for the whole bucket.
    """

    kind: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The root for texts."""
        return f"{self.bucket}{'/' + self.prefix if self.prefix else ''}"


def parse_location(url: str) -> BucketLocation:
    """Parse a URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``.

    Also ``s3a://``, and for Azure ``azure://``, ``adl://``, ``abfs://`` and ``abfss://``, of which the last two may
    name the account: ``abfss://container@account.dfs.core.windows.net/prefix``. Like the paths below it, the prefix is
    used literally, without unescaping.

    Raises:
        ValueError: the URL has another scheme, or is malformed.
        InvalidPath: the prefix is not canonical (an empty, ``.`` or ``..`` part).
    """
    match = _URL.fullmatch(url)
    kind = _KINDS.get(match[1].lower()) if match else None
    if match is None or kind is None:
        raise ValueError(
            f"{url.partition('?')[0]!r} is no URL of an object store; write s3://, gs:// or az://bucket/prefix"
        )
    scheme, host, prefix = match[1].lower(), match[2], match[3].removesuffix("/")
    account = r"[^@:?#\s]+@" if scheme in {"abfs", "abfss"} else ""
    if not re.fullmatch(rf"({account})?[^@:?#\s]+", host):
        # The host is not shown: it may contain a password before an @.
        raise ValueError(f"the bucket of a {scheme}:// URL is missing or malformed; write {scheme}://bucket/prefix")
    if prefix:
        try:
            check_path(prefix)
        except InvalidPath as error:
            raise InvalidPath(f"the prefix of {url!r} is not canonical: {error}", path=prefix) from None
    return BucketLocation(kind, f"{scheme}://{host}", prefix)


def retry_config(policy: RetryPolicy | None) -> RetryConfig:
    """Return the obstore retry options that are closest to `policy`; None: a single attempt.

    ``budget_s`` becomes obstore's ``retry_timeout``, which counts from the start of a request instead of the last
    progress; ``first_delay_s`` and ``cap_s`` bound its back-off. Not mapped: ``statuses`` (obstore retries 408, 429 and
    all 5xx) and ``Retry-After`` (obstore does not read it).
    """
    if policy is None or not policy.budget_s:
        return {"max_retries": 0}
    first, cap = timedelta(seconds=policy.first_delay_s), timedelta(seconds=policy.cap_s)
    return {
        "max_retries": 1 << 30,  # bounded by time instead
        "retry_timeout": timedelta(seconds=policy.budget_s),
        "backoff": {"init_backoff": first, "max_backoff": cap, "base": 2},
    }


def open_store(location: BucketLocation, options: Mapping[str, Any], retry: RetryPolicy | None) -> Store:
    """Make obstore's client. Reads the environment and credential files, and sends nothing.

    Args:
        location: the root.
        options: those of `ObjectStoreTransport`, by name.
        retry: for obstore's own retries; None: no retries.

    Raises:
        TransportError: obstore is not installed, or refuses the configuration; or the AWS profile is unusable.
    """
    try:
        from obstore import store as stores
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise TransportError(
            "s3, gs and az need obstore, which is not installed; install it by: pip install 'asyncloader[s3]'"
        ) from error
    config: dict[str, Any] = {}
    if location.kind == "s3":
        config.update(_from_profile(options, os.environ))
    if options["endpoint"] is not None:
        config[_ENDPOINT[location.kind]] = options["endpoint"]
    if options["region"] is not None:
        config["region"] = options["region"]
    if options["skip_signature"]:
        config["skip_signature"] = True
    config.update(options["config"])
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=options["connect_s"]),
        "read_timeout": timedelta(seconds=options["stalled_s"]),
        "timeout": _FOR_EVER,
        "user_agent": "asyncloader",
    }
    endpoints = [config.get(_ENDPOINT[location.kind]), *map(os.environ.get, _ENDPOINT_VARIABLES[location.kind])]
    endpoint = next((each for each in endpoints if each), "")
    if str(endpoint).lower().startswith("http://"):
        client["allow_http"] = True  # the user asked for it explicitly
    given: dict[str, Any] = {
        "config": config,
        "client_options": {**client, **options["client"]},
        "retry_config": retry_config(retry),
        "credential_provider": options["credentials"],
    }
    kind: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[location.kind]
    try:
        store: Store = kind.from_url(f"{location.bucket}/{quote(location.prefix)}", **given)
    except (BaseError, ValueError, TypeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise TransportError(f"{location.url} cannot be opened: {reason}") from error
    return store


def _from_profile(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the plain settings of the AWS profile that neither the options nor the environment override.

    Raises:
        TransportError: a file cannot be read, has no such profile, or has one that gets its keys by other means.
    """
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    credentials = _section(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", name)
    section = name if name == "default" else f"profile {name}"
    others = _section(environment.get("AWS_CONFIG_FILE") or "~/.aws/config", section)
    profile = {**others, **credentials}
    if not profile and name != "default":
        raise TransportError(
            f"the AWS profile {name!r} (AWS_PROFILE) is in neither ~/.aws/credentials nor ~/.aws/config; "
            "correct the name, or unset AWS_PROFILE"
        )
    found: dict[str, str] = {}
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        found["region"] = profile["region"]
    if "endpoint_url" in profile and not set(_ENDPOINT_VARIABLES["s3"]) & environment.keys():
        found["endpoint"] = profile["endpoint_url"]
    anonymous = options["skip_signature"] or environment.get("AWS_SKIP_SIGNATURE", "").lower() in _YES
    if (
        anonymous
        or options["credentials"] is not None
        or {"access_key_id", "aws_access_key_id", "skip_signature"} & {str(each).lower() for each in options["config"]}
        or {"AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"} & environment.keys()
    ):
        return found
    # Both parts of a key must come from the same file.
    keys = next((each for each in (credentials, others) if _KEYS.keys() <= each.keys() | {"aws_session_token"}), {})
    indirect = next((each for each in _INDIRECT if each in profile), None)
    if not keys and indirect is not None:
        raise TransportError(
            f"the AWS profile {name!r} gets its keys by {indirect}, which obstore cannot do; pass "
            "credentials=obstore.auth.boto3.Boto3CredentialProvider() (it needs boto3), or export the keys by: "
            f"eval $(aws configure export-credentials --profile {name} --format env)"
        )
    return {**found, **{ours: keys[theirs] for theirs, ours in _KEYS.items() if keys.get(theirs)}}


def _section(file: str, name: str) -> dict[str, str]:
    path = Path(file).expanduser()
    # No interpolation: a secret may contain a percent sign. No defaults section: [default] is a profile here.
    parser = ConfigParser(interpolation=None, default_section="\0", strict=False)
    try:
        with path.open(encoding="utf-8") as lines:
            parser.read_file(lines)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        # Neither chained nor quoted: the text of a parser's error contains lines of the file.
        raise TransportError(
            f"{path} cannot be read: {type(error).__name__}; correct it, or pass credentials="
        ) from None
    return dict(parser[name]) if name in parser else {}

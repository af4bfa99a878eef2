-- What sqlc must know to type the queries but cannot read from migrations/:
-- River's tables, and those that a migration creates only where they are absent.
-- Nothing runs this file; `task verify` prepares every query against a migrated
-- database, so a column that is wrong here does not pass.

CREATE SCHEMA river;

CREATE TYPE river.river_job_state AS ENUM (
    'available', 'cancelled', 'completed', 'discarded', 'pending', 'retryable', 'running', 'scheduled'
);

CREATE TABLE river.river_job (
    id           bigint NOT NULL,
    state        river.river_job_state NOT NULL,
    attempt      smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempted_at timestamptz,
    created_at   timestamptz NOT NULL,
    finalized_at timestamptz,
    scheduled_at timestamptz NOT NULL,
    priority     smallint NOT NULL,
    args         jsonb NOT NULL,
    attempted_by text[],
    errors       jsonb[],
    kind         text NOT NULL,
    metadata     jsonb NOT NULL,
    queue        text NOT NULL,
    tags         text[] NOT NULL
);

CREATE TABLE public.organizations (
    id uuid NOT NULL
);

CREATE TABLE public.contacts (
    id              uuid NOT NULL,
    organization_id uuid NOT NULL,
    phone           text
);

CREATE TABLE public.conversations (
    id              uuid NOT NULL,
    organization_id uuid NOT NULL,
    contact_id      uuid NOT NULL,
    session         text NOT NULL
);

CREATE TABLE public.messages (
    id              uuid NOT NULL,
    organization_id uuid NOT NULL,
    conversation_id uuid NOT NULL,
    direction       text NOT NULL,
    body            text NOT NULL,
    status          text NOT NULL,
    waha_message_id text,
    updated_at      timestamptz NOT NULL
);

CREATE TABLE public.audit_log (
    id              uuid NOT NULL,
    organization_id uuid,
    actor_id        text,
    action          text NOT NULL,
    entity_kind     text,
    entity_id       uuid,
    reason          text,
    metadata        jsonb NOT NULL,
    created_at      timestamptz NOT NULL
);

CREATE TABLE public.webhook_subscriptions (
    id                   uuid NOT NULL,
    organization_id      uuid NOT NULL,
    url                  text NOT NULL,
    secret               text,
    event_types          text[] NOT NULL,
    enabled              boolean NOT NULL,
    consecutive_failures integer NOT NULL,
    created_at           timestamptz NOT NULL,
    description          text NOT NULL,
    sealed_headers       bytea,
    headers_key          text,
    max_concurrent       integer NOT NULL,
    rate_per_second      integer NOT NULL,
    next_slot_at         timestamptz,
    open_until           timestamptz,
    opened_at            timestamptz,
    probing              boolean NOT NULL,
    unsafe_failures      integer NOT NULL,
    disabled_at          timestamptz,
    disabled_reason      text,
    secret_fault         text
);

CREATE TABLE river.river_leader (
    leader_id  text NOT NULL,
    elected_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL
);

CREATE TABLE river.river_queue (
    name      text NOT NULL,
    paused_at timestamptz
);

CREATE TABLE public.ai_budget_daily (
    organization_id    uuid NOT NULL,
    day                date NOT NULL,
    daily_budget_cents bigint NOT NULL,
    used_cents         bigint NOT NULL,
    updated_at         timestamptz NOT NULL
);

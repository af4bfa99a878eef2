-- Crons outlive the processes that fire them: what was decided is here, one row
-- for each tick that became a job, so that no leader and no clock of a process
-- is what keeps a tick from being fired twice or not at all.

-- +goose Up
CREATE TABLE public.crons (
    name          text PRIMARY KEY,
    spec          text NOT NULL,
    zone          text NOT NULL,
    missed        text NOT NULL CHECK (missed IN ('skip', 'once', 'all')),
    max_missed    integer NOT NULL CHECK (max_missed > 0),
    jitter        interval NOT NULL CHECK (jitter >= interval '0'),
    disabled      boolean NOT NULL,
    paused_at     timestamptz,
    paused_by     text,
    next_tick     timestamptz NOT NULL,
    skipped       bigint NOT NULL DEFAULT 0,
    running_job   bigint,
    registered_at timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE public.crons IS
    'The crons as the newest process to start declared them, and how far each has come.';
COMMENT ON COLUMN public.crons.missed IS
    'What becomes of ticks that nobody was there for: skip none runs, once the newest, all the newest max_missed.';
COMMENT ON COLUMN public.crons.disabled IS
    'Switched off by the file of overrides.';
COMMENT ON COLUMN public.crons.next_tick IS
    'The first tick that is not decided: every one before it became a job or was skipped.';
COMMENT ON COLUMN public.crons.skipped IS
    'How many ticks became no job, since they were missed or the job before them still waited.';
COMMENT ON COLUMN public.crons.running_job IS
    'The job that ran last, or runs: no other one may begin before it has ended.';
ALTER TABLE public.crons ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.crons FROM anon, authenticated, service_role;

CREATE TABLE public.cron_ticks (
    cron       text NOT NULL REFERENCES public.crons (name) ON DELETE CASCADE,
    tick       timestamptz NOT NULL,
    job_id     bigint NOT NULL,
    late       boolean NOT NULL,
    by_hand    boolean NOT NULL,
    decided_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (cron, tick)
);
COMMENT ON TABLE public.cron_ticks IS
    'The ticks that became a River job. Rows of more than 30 days ago are deleted.';
COMMENT ON COLUMN public.cron_ticks.late IS
    'The tick was missed, and made up for.';
ALTER TABLE public.cron_ticks ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.cron_ticks FROM anon, authenticated, service_role;

-- +goose Down
DROP TABLE public.cron_ticks;
DROP TABLE public.crons;

-- name: GetClock :one
-- GetClock returns what time it is in the database.
SELECT clock_timestamp()::timestamptz AS now;

-- name: SetActor :exec
-- SetActor says for the rest of the transaction who acts, and why.
SELECT set_config('afluente.actor', @actor::text, true), set_config('afluente.reason', @reason::text, true);

-- name: SetLockTimeout :exec
-- SetLockTimeout bounds for the rest of the transaction how long a lock is
-- waited for.
SELECT set_config('lock_timeout', @timeout::text, true);

-- name: SetIdleTimeout :exec
-- SetIdleTimeout lets the server end the transaction when the process does
-- nothing in it for so long.
SELECT set_config('idle_in_transaction_session_timeout', @timeout::text, true);

-- name: UseJobIndexes :exec
-- UseJobIndexes lets the rest of the transaction find jobs by their metadata
-- through River's index, whatever the statistics say of a table that grows so
-- fast.
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true);

-- name: CleanJobIndex :exec
-- CleanJobIndex merges what is pending in that index, where it is, which every
-- search would read otherwise.
SELECT gin_clean_pending_list(i) FROM to_regclass('river.river_job_metadata_index') AS i WHERE i IS NOT NULL;

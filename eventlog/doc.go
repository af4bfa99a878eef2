// Package eventlog is an event bus in PostgreSQL that runs its work on River.
//
// Code in any language writes an event into event_log in its own transaction
// ([Emit] from Go, emit_event from SQL). A [Bridge] turns each event into one
// River job for each consumer of its type, and a trigger on River's table
// carries what becomes of the jobs back to the event. A [Scheduler] does for the
// ticks of crons what the bridge does for events.
//
// What the package promises:
//
//   - An event is on the bus if and only if the transaction that emitted it
//     committed, whenever that was: there is no cursor that it could fall behind.
//
//   - Each consumer registered for the event's type gets exactly one job for
//     it, however many bridges run and wherever one of them is killed.
//
//   - A job runs at least once. It may run twice when its process is killed or
//     frozen between the side effect and the commit, so a side effect carries
//     an idempotency key.
//
//   - A consumer that fails does not touch the other consumers of the event; a
//     job that gives up is kept for an operator until he retries or deletes it.
//
//   - An event that one consumer cannot read ends in the dead letters of that
//     consumer alone, and the events behind it go on.
//
//   - The state of an event changes in the very transaction in which the state
//     of its job does, whoever changes it.
//
//   - A consumer reads every event in the newest shape of its type, whichever
//     version the emitter wrote.
//
//   - Each tick of a cron becomes exactly one job, or none where the cron's
//     [Policy] says so, whichever processes are killed or frozen meanwhile. Two
//     jobs of a cron do not run at a time while their process lives.
//
//   - Events of one key of an ordered consumer ([Declaration.Ordered]) are done one
//     at a time, in the order in which they were emitted, and a dead one touches
//     no other key. No more jobs of an organization run at a time than its
//     consumer's limit ([Declaration.LimitedPerOrganization]).
//
//   - An organization that emits very many events does not hold up the others'.
//
//   - Whoever retries, discards or replays many events moves each of them once,
//     and can be stopped at any moment.
//
// A [Stream], which is for screens, promises none of this but that nobody sees
// another organization's events.
package eventlog

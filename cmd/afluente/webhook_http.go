package main

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"

	"afluente/jobs"
	"afluente/jobs/webhook"
)

const (
	webhooksPath   = "/api/v1/webhooks"
	maxWebhookBody = 256 << 10
)

// openAPI describes what webhookAPI serves.
//
//go:embed openapi.json
var openAPI []byte

// webhookAPI serves /api/v1/webhooks: what the commands of 'afluente webhook' do,
// for the organization of the caller's token. What is another organization's does
// not exist for it.
type webhookAPI struct {
	webhooks *jobs.Webhooks
	tokens   *tokens  // nil without a key
	roles    []string // nil for all
	log      *zap.Logger
}

// webhookCall is one request to the API.
type webhookCall struct {
	*http.Request

	api   *webhookAPI
	scope jobs.Scope
	id    uuid.UUID // of the webhook, where the path has one
}

type webhookRoute struct {
	pattern string
	serve   func(*webhookCall) (status int, answer any, err error)
}

func webhookRoutes() []webhookRoute {
	const one = webhooksPath + "/{id}"
	return []webhookRoute{
		{"GET " + webhooksPath, listWebhooks},
		{"POST " + webhooksPath, createWebhook},
		{"GET " + one, getWebhook},
		{"PATCH " + one, updateWebhook},
		{"DELETE " + one, deleteWebhook},
		{"POST " + one + "/enable", enableWebhook},
		{"POST " + one + "/disable", disableWebhook},
		{"POST " + one + "/test", testWebhook},
		{"POST " + one + "/rotate", rotateWebhook},
		{"POST " + one + "/promote", promoteWebhook},
		{"POST " + one + "/recover", recoverWebhook},
		{"POST " + one + "/replay-missing", replayMissing},
		{"GET " + one + "/deliveries", listDeliveries},
		{"GET " + one + "/deliveries/{delivery}", getDelivery},
		{"POST " + one + "/deliveries/{delivery}/resend", resendDelivery},
	}
}

func (a *webhookAPI) register(mux *http.ServeMux) {
	for _, route := range webhookRoutes() {
		mux.Handle(route.pattern, a.handler(route.serve))
	}
	mux.HandleFunc("OPTIONS "+webhooksPath+"/", allowWebhooks)
	mux.HandleFunc("OPTIONS "+webhooksPath, allowWebhooks)
	mux.HandleFunc("GET /api/v1/openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Access-Control-Allow-Origin", "*")
		_, _ = w.Write(openAPI)
	})
}

// allowWebhooks lets pages of any origin ask: the token is no cookie, so another
// site cannot use it.
func allowWebhooks(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Access-Control-Allow-Origin", "*")
	w.Header().Set("Access-Control-Allow-Methods", "GET, POST, PATCH, DELETE")
	w.Header().Set("Access-Control-Allow-Headers", "Authorization, Content-Type, Idempotency-Key")
	w.Header().Set("Access-Control-Max-Age", "86400")
	w.WriteHeader(http.StatusNoContent)
}

// errBody says that a request is not one that the API knows.
var errBody = errors.New("cannot be read")

func (a *webhookAPI) handler(serve func(*webhookCall) (int, any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "*")
		w.Header().Set("Cache-Control", "no-store")
		call := &webhookCall{Request: r, api: a}
		if !a.identify(w, call) {
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxWebhookBody)
		if !call.readID() {
			a.fail(w, call, jobs.ErrNotFound)
			return
		}
		status, answer, err := serve(call)
		if err != nil {
			a.fail(w, call, err)
			return
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.WriteHeader(status)
		if status != http.StatusNoContent {
			_ = json.NewEncoder(w).Encode(answer)
		}
	}
}

// identify finds out whose webhooks the caller may touch, or answers why none.
func (a *webhookAPI) identify(w http.ResponseWriter, call *webhookCall) bool {
	if a.tokens == nil {
		writeMessage(w, http.StatusNotFound, "the API is off: AFLUENTE_JWT_SECRET and AFLUENTE_JWKS_URL are unset")
		return false
	}
	who, err := a.tokens.read(bearerHeader(call.Request))
	switch {
	case errors.Is(err, errNoOrganization):
		writeMessage(w, http.StatusForbidden, err.Error())
		return false
	case err != nil:
		w.Header().Set("WWW-Authenticate", `Bearer error="invalid_token"`)
		writeMessage(w, http.StatusUnauthorized, "the token is missing, expired or not ours")
		return false
	case a.roles != nil && !slices.Contains(a.roles, who.role):
		writeMessage(w, http.StatusForbidden, "the token's role may not manage webhooks")
		return false
	}
	call.scope = jobs.Scope{Organization: &who.organizationID, Actor: "user:" + who.user}
	return true
}

// readID reads the id in the path, if it has one.
func (c *webhookCall) readID() bool {
	text := c.PathValue("id")
	if text == "" {
		return true
	}
	var err error
	c.id, err = uuid.Parse(text)
	return err == nil
}

func (c *webhookCall) deliveryID() (uuid.UUID, error) {
	id, err := uuid.Parse(c.PathValue("delivery"))
	if err != nil {
		return uuid.Nil, jobs.ErrNotFound
	}
	return id, nil
}

func (a *webhookAPI) fail(w http.ResponseWriter, call *webhookCall, err error) {
	status := http.StatusInternalServerError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		writeMessage(w, http.StatusRequestEntityTooLarge, "the body is too long")
		return
	case errors.Is(err, errBody):
		status = http.StatusBadRequest
	case errors.Is(err, jobs.ErrNotFound):
		status = http.StatusNotFound
	case errors.Is(err, jobs.ErrUnderWay), errors.Is(err, jobs.ErrDisabled):
		status = http.StatusConflict
	case errors.Is(err, jobs.ErrInvalid):
		status = http.StatusUnprocessableEntity
	case errors.Is(err, webhook.ErrNoKey):
		status = http.StatusServiceUnavailable
	default:
		a.log.Error("request failed", zap.String("method", call.Method), zap.String("pattern", call.Pattern), zap.Error(err))
		writeMessage(w, status, "it did not work; the log tells why")
		return
	}
	writeMessage(w, status, err.Error())
}

// read reads the body into a value. None is like an empty object.
func (c *webhookCall) read(into any) error {
	decoder := json.NewDecoder(c.Body)
	decoder.DisallowUnknownFields()
	err := decoder.Decode(into)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil && decoder.More() {
		err = errors.New("more than one value")
	}
	if err != nil {
		return fmt.Errorf("the body %w: %w", errBody, err)
	}
	return nil
}

func listWebhooks(c *webhookCall) (int, any, error) {
	list, err := c.api.webhooks.List(c.Context(), c.scope)
	return http.StatusOK, list, err
}

func createWebhook(c *webhookCall) (int, any, error) {
	var request jobs.NewWebhook
	if err := c.read(&request); err != nil {
		return 0, nil, err
	}
	created, secret, err := c.api.webhooks.Create(c.Context(), c.scope, *c.scope.Organization, request)
	return http.StatusCreated, createdWebhook{created, secret}, err
}

func getWebhook(c *webhookCall) (int, any, error) {
	found, err := c.api.webhooks.Get(c.Context(), c.scope, c.id)
	return http.StatusOK, found, err
}

func updateWebhook(c *webhookCall) (int, any, error) {
	var settings jobs.WebhookSettings
	if err := c.read(&settings); err != nil {
		return 0, nil, err
	}
	updated, err := c.api.webhooks.Update(c.Context(), c.scope, c.id, settings)
	return http.StatusOK, updated, err
}

func deleteWebhook(c *webhookCall) (int, any, error) {
	return http.StatusNoContent, nil, c.api.webhooks.Delete(c.Context(), c.scope, c.id)
}

func enableWebhook(c *webhookCall) (int, any, error) {
	enabled, err := c.api.webhooks.Enable(c.Context(), c.scope, c.id)
	return http.StatusOK, enabled, err
}

func disableWebhook(c *webhookCall) (int, any, error) {
	disabled, err := c.api.webhooks.Disable(c.Context(), c.scope, c.id)
	return http.StatusOK, disabled, err
}

func testWebhook(c *webhookCall) (int, any, error) {
	result, err := c.api.webhooks.Test(c.Context(), c.scope, c.id)
	return http.StatusOK, result, err
}

func rotateWebhook(c *webhookCall) (int, any, error) {
	var request struct {
		Grace  *string `json:"grace"`
		Secret string  `json:"secret"`
	}
	if err := c.read(&request); err != nil {
		return 0, nil, err
	}
	grace := defaultGrace
	if request.Grace != nil {
		var err error
		if grace, err = time.ParseDuration(*request.Grace); err != nil {
			return 0, nil, fmt.Errorf("%w: grace is not a duration such as 24h", jobs.ErrInvalid)
		}
	}
	secret, err := c.api.webhooks.Rotate(c.Context(), c.scope, c.id, grace, request.Secret)
	return http.StatusOK, map[string]string{"secret": secret}, err
}

func promoteWebhook(c *webhookCall) (int, any, error) {
	promoted, err := c.api.webhooks.Promote(c.Context(), c.scope, c.id)
	return http.StatusOK, promoted, err
}

// readSince reads the body of a request that sends much once more.
func (c *webhookCall) readSince() (time.Time, error) {
	var request struct {
		Since *time.Time `json:"since"`
	}
	if err := c.read(&request); err != nil {
		return time.Time{}, err
	}
	if request.Since == nil {
		return time.Time{}, fmt.Errorf("%w: since is required", jobs.ErrInvalid)
	}
	return *request.Since, nil
}

func recoverWebhook(c *webhookCall) (int, any, error) {
	since, err := c.readSince()
	if err != nil {
		return 0, nil, err
	}
	recovered, err := c.api.webhooks.Recover(c.Context(), c.scope, c.id, since)
	return http.StatusAccepted, map[string]int{"recovered": recovered}, err
}

func replayMissing(c *webhookCall) (int, any, error) {
	since, err := c.readSince()
	if err != nil {
		return 0, nil, err
	}
	replayed, err := c.api.webhooks.ReplayMissing(c.Context(), c.scope, c.id, since)
	return http.StatusAccepted, map[string]int{"replayed": replayed}, err
}

func listDeliveries(c *webhookCall) (int, any, error) {
	query := c.URL.Query()
	filter := jobs.DeliveryFilter{State: query.Get("state"), Limit: 50}
	var err error
	if text := query.Get("limit"); text != "" {
		if filter.Limit, err = strconv.Atoi(text); err != nil {
			return 0, nil, fmt.Errorf("%w: limit is not a number", jobs.ErrInvalid)
		}
	}
	if text := query.Get("after"); text != "" {
		if filter.After, err = uuid.Parse(text); err != nil {
			return 0, nil, fmt.Errorf("%w: after is not a UUID", jobs.ErrInvalid)
		}
	}
	deliveries, err := c.api.webhooks.Deliveries(c.Context(), c.scope, c.id, filter)
	return http.StatusOK, deliveries, err
}

func getDelivery(c *webhookCall) (int, any, error) {
	id, err := c.deliveryID()
	if err != nil {
		return 0, nil, err
	}
	delivery, attempts, err := c.api.webhooks.Delivery(c.Context(), c.scope, c.id, id)
	return http.StatusOK, deliveryWithAttempts{delivery, attempts}, err
}

func resendDelivery(c *webhookCall) (int, any, error) {
	id, err := c.deliveryID()
	if err != nil {
		return 0, nil, err
	}
	delivery, err := c.api.webhooks.Resend(c.Context(), c.scope, c.id, id, c.Header.Get("Idempotency-Key"))
	return http.StatusAccepted, delivery, err
}
